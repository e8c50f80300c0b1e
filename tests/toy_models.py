"""Tiny random causal language models, one per family: the code of the real ones, weights of no meaning.

The weights are so large that attention is peaked and outputs are varied: a wrong position, mask or window changes
the tokens, so equal tokens mean something.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96
WINDOW = 6
"""Tokens that a sliding layer sees: fewer than most prompts have."""
MAX_LENGTH = 64

SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,  # a random model with tied embeddings mostly repeats its last token
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""The config of a family, unless its overrides say otherwise."""

DROP = object()
"""As an override: the family's config has no such name."""

NO_SIZES = dict.fromkeys(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ),
    DROP,
)
"""For configs that have names of their own for all of these."""

GPT2_SIZES = NO_SIZES | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": MAX_LENGTH}
MULTI_HEAD = {"num_key_value_heads": DROP}
ALTERNATING = {"num_hidden_layers": 4, "sliding_window": WINDOW}
HEAD_SIZE = {"head_dim": 16}
FALCON = {"num_key_value_heads": DROP, "intermediate_size": DROP}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "max_position_embeddings": 2 * MAX_LENGTH,
    "original_max_position_embeddings": MAX_LENGTH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        "original_max_position_embeddings": MAX_LENGTH,
    },
}


@dataclass(frozen=True)
class Family:
    """A model type, and how its config differs from `SMALL`."""

    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


def _moe(model_type: str, *overrides: Mapping[str, Any]) -> Family:
    """Experts run in float32: the grouped matrix product refuses doubles."""
    return Family(model_type, {key: value for part in overrides for key, value in part.items()}, torch.float32)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama3_rope": Family("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "ministral": Family("ministral", ALTERNATING | HEAD_SIZE),
    "qwen2": Family("qwen2"),
    "qwen2_yarn": Family("qwen2", {"rope_parameters": YARN}),
    "qwen2_sliding": Family("qwen2", ALTERNATING | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": Family("qwen3", HEAD_SIZE),
    "gemma": Family("gemma", HEAD_SIZE),
    "gemma2": Family(
        "gemma2",
        ALTERNATING
        | HEAD_SIZE
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": Family(
        "gemma3_text", ALTERNATING | HEAD_SIZE | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2}
    ),
    "gemma3n": Family(  # the last two layers have no keys and values of their own
        "gemma3n_text",
        ALTERNATING
        | HEAD_SIZE
        | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 4}
        | {"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "phi": Family("phi"),
    "phi3": Family("phi3", {"sliding_window": WINDOW}),
    "phi3_longrope": Family("phi3", LONGROPE),
    "gpt_neox": Family("gpt_neox", MULTI_HEAD),
    "gpt2": Family("gpt2", GPT2_SIZES),
    "opt": Family("opt", MULTI_HEAD | {"intermediate_size": DROP, "ffn_dim": 64}),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", ALTERNATING),
    "granite": Family("granite", {"attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "cohere": Family("cohere", {"logit_scale": 0.5}),
    "cohere2": Family("cohere2", ALTERNATING | HEAD_SIZE | {"logit_scale": 0.5}),
    "smollm3": Family("smollm3", ALTERNATING | {"use_sliding_window": True, "no_rope_layer_interval": 2}),
    "glm": Family("glm", HEAD_SIZE),
    "glm4": Family("glm4", HEAD_SIZE),
    "gptj": Family("gptj", GPT2_SIZES | {"rotary_dim": 8}),
    "codegen": Family("codegen", GPT2_SIZES | {"rotary_dim": 8}),
    "stablelm": Family("stablelm", {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "gpt_bigcode": Family("gpt_bigcode", GPT2_SIZES | {"multi_query": True}),
    "exaone4": Family("exaone4", ALTERNATING | {"sliding_window_pattern": 2}),
    "nemotron": Family("nemotron"),
    "ernie4_5": Family("ernie4_5", HEAD_SIZE),
    "minicpm3": Family("minicpm3", LATENT),
    "gpt_oss": _moe("gpt_oss", ALTERNATING, HEAD_SIZE, LOCAL_EXPERTS, {"rope_parameters": YARN}),
    "mixtral": _moe("mixtral", LOCAL_EXPERTS, {"sliding_window": WINDOW}),
    "qwen3_moe": _moe("qwen3_moe", EXPERTS, HEAD_SIZE, {"use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen2_moe": _moe(
        "qwen2_moe",
        EXPERTS,
        ALTERNATING,
        {"use_sliding_window": True, "max_window_layers": 4, "shared_expert_intermediate_size": 32},
    ),
    "olmoe": _moe("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": _moe("phimoe", LOCAL_EXPERTS, {"sliding_window": WINDOW}),
    "deepseek_v2": _moe("deepseek_v2", LATENT, ROUTED_EXPERTS),
    "deepseek_v3": _moe("deepseek_v3", LATENT, ROUTED_EXPERTS),
    "glm4_moe": _moe("glm4_moe", HEAD_SIZE, ROUTED_EXPERTS),
    "granitemoe": _moe("granitemoe", LOCAL_EXPERTS, {"attention_multiplier": 0.3}),
    "granitemoehybrid": _moe(  # Granite 4 without recurrent layers, in the class made for hybrids
        "granitemoehybrid",
        LOCAL_EXPERTS,
        {"layer_types": ["attention"] * 2, "shared_intermediate_size": 32},
        {"mamba_n_heads": 4, "mamba_d_head": 24},
    ),
    "afmoe": _moe(  # views the attention's output, which therefore must be contiguous
        "afmoe",
        ALTERNATING,
        HEAD_SIZE,
        EXPERTS,
        {"num_dense_layers": 1, "global_attn_every_n_layers": 2},
    ),
}

PADDED_FAMILIES: dict[str, Family] = {
    "bloom": Family("bloom", NO_SIZES | {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": Family("mpt", NO_SIZES | {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_LENGTH}),
    "falcon_alibi": Family("falcon", FALCON | {"alibi": True}),
    "falcon_rotary": Family("falcon", FALCON | {"alibi": False}),
    "gpt_neo": Family(
        "gpt_neo",
        {"num_key_value_heads": DROP, "num_attention_heads": DROP, "num_hidden_layers": DROP}
        | {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "llama4": Family(
        "llama4_text",
        HEAD_SIZE
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
        | {"attention_chunk_size": 8},
    ),
}
"""Families that cannot run packed, for ALiBi or attention of their own, and whose cache can be rolled back."""


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """The family's model. The same name and seed give the same weights."""
    entry = {**FAMILIES, **PADDED_FAMILIES}[family]
    return make_model_of(entry.model_type, entry.overrides, entry.dtype, seed)


def make_model_of(
    model_type: str,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of any causal type, without end tokens, so that `generate` runs to its budget.

    The global random state stays as it is.
    """
    values = {key: value for key, value in {**SMALL, **(overrides or {})}.items() if value is not DROP}
    config = AutoConfig.for_model(model_type, **deepcopy(values))  # configs change the dicts they are given
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        _fill(model)
    for holder in (model.config, model.generation_config):
        holder.bos_token_id = holder.eos_token_id = holder.pad_token_id = None
    return model.eval()


@torch.no_grad()
def _fill(model: PreTrainedModel) -> None:
    """Make matrices large and embeddings larger; move biases and norms off their 0 and 1, so that they count."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.normal_(0.0, 1.0)
