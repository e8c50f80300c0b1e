"""Settings of an engine: frozen, and validated here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("draft_model", "ngram")
STRATEGIES = ("packed",)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How draft tokens are made.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    method: str
    """`draft_model`: a smaller model with the same tokenizer; `ngram`: look the last tokens up in the text."""
    model: Any = None
    """For `draft_model`: a hub id, a folder, a .gguf file or a loaded `PreTrainedModel`."""
    num_speculative_tokens: int = 4
    """Draft tokens per row and round, at most."""
    prompt_lookup_max: int = 3
    """For `ngram`: the longest run of last tokens that is looked up; tried first."""
    prompt_lookup_min: int = 2
    """For `ngram`: the shortest run of last tokens that is looked up; tried last."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        _check_at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        _check_at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        _check_at_least("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        if self.method == "draft_model" and self.model is None:
            raise ValueError("model must be given for method draft_model: a hub id, a folder or a loaded model")
        if self.method != "draft_model" and self.model is not None:
            raise ValueError(f"model must not be given for method {self.method}: it drafts without one")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Read vLLM's `speculative_config` dictionary.

        Raises:
            ValueError: an unknown key, a missing `method`, or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known), key=str)
        if unknown:
            raise ValueError(f"speculative_config has no key {unknown[0]!r}; allowed are {', '.join(known)}")
        if "method" not in values:
            raise ValueError(f"speculative_config needs the key 'method': one of {', '.join(METHODS)}")
        return cls(**values)


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    max_model_len: int
    """Tokens that a request may have, prompt and output together."""
    max_num_seqs: int = 8
    """Rows: sequences that are decoded at the same time."""
    strategy: str = "packed"
    num_speculative_tokens: int = 0
    """Draft tokens per row and round, at most; 0 without a drafter."""

    def __post_init__(self) -> None:
        _check_at_least("max_model_len", self.max_model_len, 2)
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")


def _check_at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
