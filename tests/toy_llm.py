"""The toy llama over bytes as an LLM, with every kind of drafter."""

from __future__ import annotations

from functools import cache

import torch
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM

MODEL = text_llama(seed=1)
TOKENIZER = byte_tokenizer()
STRATEGIES = ("packed", "eqspec", "exspec")


def resized(size: int):
    """The target with another number of embeddings; those beyond its own are random."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = text_llama(seed=1)
        model.resize_token_embeddings(size, mean_resizing=False)
    return model


def drafting_with(model, num_speculative_tokens: int):
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num_speculative_tokens}


DRAFTING = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5, "suffix_min_match": 1},
    "itself": drafting_with(MODEL, 3),
    "unrelated": drafting_with(text_llama(seed=2), 2),
}
PADDED = {
    "larger vocabulary": drafting_with(resized(320), 4),
    "smaller vocabulary": drafting_with(resized(250), 4),
}
DRAFTERS = [name for name in DRAFTING if name != "none"]


def new_llm(drafter: str = "none", sampling_method: str = "coupled", max_num_seqs: int = 4, **settings) -> LLM:
    config = (DRAFTING | PADDED)[drafter]
    return LLM(
        MODEL,
        tokenizer=TOKENIZER,
        speculative_config=config and config | {"sampling_method": sampling_method},
        max_num_seqs=max_num_seqs,
        **settings,
    )


make_llm = cache(new_llm)
"""For requests with a seed of their own, as others are counted."""


def generate(llm: LLM, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)
