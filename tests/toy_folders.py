"""Toy models with a tokenizer, saved the way users have them."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from toy_text import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 258


def text_llama(seed: int = 0, layers: int = 2, window: int = 256) -> LlamaForCausalLM:
    """A small llama over bytes that says readable characters, with weights large enough that its text varies."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double().eval()
    readable = byte_tokenizer()(string.ascii_letters + " .\n").input_ids
    silent = [token for token in range(256) if token not in readable]
    model.lm_head.weight.data[silent] = 0.0  # never the largest logit
    return model


def save_text_llama(folder: Path, seed: int = 0, **settings) -> Path:
    text_llama(seed, **settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
