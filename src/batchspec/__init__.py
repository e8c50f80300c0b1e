"""batchspec: batched speculative decoding for Hugging Face models that cannot change the output."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchspec.config import PoolConfig, SpeculativeConfig
from batchspec.outputs import CompletionOutput, Logprob, RequestOutput
from batchspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchspec.engine import Engine
    from batchspec.llm import LLM
    from batchspec.models.loader import bundled_model

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "PoolConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "bundled_model",
]

_LAZY = {
    "LLM": "batchspec.llm",
    "Engine": "batchspec.engine",
    "bundled_model": "batchspec.models.loader",
}
"""Names whose modules import torch and transformers: only when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'batchspec' has no attribute {name!r}")
