"""batchspec: batched speculative decoding for Hugging Face models that cannot change the output."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchspec.config import SpeculativeConfig
from batchspec.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from batchspec.engine import Engine
    from batchspec.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Engine", "RequestOutput", "SamplingParams", "SpeculativeConfig"]

_LAZY = {"LLM": "batchspec.llm", "Engine": "batchspec.engine"}
"""Names whose modules import torch and transformers: only when they are asked for."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'batchspec' has no attribute {name!r}")
