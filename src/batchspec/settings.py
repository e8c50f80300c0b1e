"""Settings of an engine as text: `key=value`, with the keys of `LLM` and of its two configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchspec.config import PoolConfig, SpeculativeConfig
from batchspec.llm import LLM

GIVEN = ("self", "model", "tokenizer", "skip_tokenizer_init", "dtype", "device", "max_num_seqs")
"""Arguments of `LLM` that commands set themselves: alike for all engines that they compare, or the batch size."""

CONFIGS = ("speculative_config", "pool_config")

LLM_KEYS: tuple[str, ...] = (
    *(name for name in inspect.signature(LLM.__init__).parameters if name not in GIVEN + CONFIGS),
    *(entry.name for config in (SpeculativeConfig, PoolConfig) for entry in fields(config)),
)


def llm_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Sort options into arguments of `LLM` with its two configs.

    >>> llm_settings({"strategy": "exspec", "method": "ngram", "window": 8})["pool_config"]
    {'window': 8}

    Raises:
        ValueError: settings of speculation without its `method`, or out of range.
    """
    speculation, pool = (
        {entry.name: options[entry.name] for entry in fields(config) if entry.name in options}
        for config in (SpeculativeConfig, PoolConfig)
    )
    settings = {name: value for name, value in options.items() if name not in speculation | pool}
    if speculation:
        SpeculativeConfig.from_dict(speculation)  # checked before anything is loaded
        settings["speculative_config"] = speculation
    if pool:
        PoolConfig.from_dict(pool)
        settings["pool_config"] = pool
    return settings


def read_value(text: str) -> Any:
    """A number or a truth value if it reads like one, else the text.

    >>> [read_value(text) for text in ("4", "0.5", "True", "fast")]
    [4, 0.5, True, 'fast']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
