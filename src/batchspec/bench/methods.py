"""What `batchspec bench` compares: our methods, and transformers' two ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from batchspec.config import METHODS, EngineConfig
from batchspec.settings import LLM_KEYS, llm_settings, read_value

NONE = "none"
BATCHED = "transformers"
ASSISTED = "transformers-assisted"
KINDS = (NONE, *METHODS, BATCHED, ASSISTED)

KEYS: dict[str, tuple[str, ...]] = {BATCHED: (), ASSISTED: ("model", "num_speculative_tokens")}
"""What transformers' ways can be told; ours take all keys but `method`."""

OUR_KEYS = tuple(key for key in LLM_KEYS if key != "method")


@dataclass(frozen=True, slots=True)
class Method:
    """One way to generate, with its settings."""

    name: str
    """As it was asked for: what tables and documents call it."""
    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.kind not in KEYS

    @property
    def wants_plain_weights(self) -> bool:
        """Does it run the model as it was saved, rather than prepacked for the CPU?"""
        return not self.is_ours or self.options.get("prepack") is False

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `LLM`; of our methods only."""
        return llm_settings(self.options if self.kind == NONE else {"method": self.kind, **self.options})

    @property
    def has_to_be_exact(self) -> bool:
        """Is it promised that this method's tokens are those without drafts, bit for bit?

        >>> [method.has_to_be_exact for method in parse_methods(["none,ngram,numerics=fast,transformers"])]
        [True, False, False]
        """
        promised = {"strategy": "packed", "numerics": "invariant", "sampling_method": "coupled", "prepack": True}
        return self.is_ours and all(self.options.get(key, value) == value for key, value in promised.items())


def parse_methods(texts: Iterable[str], draft_model: str | None = None) -> list[Method]:
    """Read lists of methods with commas between; `key=value` is a setting of the method before it.

    `draft_model` is the model of those that need one and name none.

    >>> [(method.name, method.options) for method in parse_methods(["none,ngram,num_speculative_tokens=8"])]
    [('none', {}), ('ngram,num_speculative_tokens=8', {'num_speculative_tokens': 8})]

    Raises:
        ValueError: an unknown method or key, a setting out of range, or the same method twice.
    """
    groups: list[list[str]] = []
    for text in texts:
        for place, part in enumerate(part.strip() for part in text.split(",")):
            if place and "=" in part:
                groups[-1].append(part)
            else:
                groups.append([part])
    methods = [_method(kind, parts, draft_model) for kind, *parts in groups]
    names = [method.name for method in methods]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"--methods must name each method once, got {twice[0]!r} {names.count(twice[0])} times")
    return methods


def _method(kind: str, parts: list[str], draft_model: str | None) -> Method:
    if kind not in KINDS:
        raise ValueError(f"--methods must be of {', '.join(KINDS)}, got {kind!r}")
    keys = KEYS.get(kind, OUR_KEYS)
    options: dict[str, Any] = {}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in keys or key in options:
            raise ValueError(f"--methods {kind}: {part!r} must be key=value, once each; keys are {_listed(keys)}")
        options[key] = value if key == "model" else read_value(value)
    if kind in ("draft_model", ASSISTED) and draft_model is not None:
        options.setdefault("model", draft_model)
    method = Method(",".join([kind, *parts]), kind, options)
    if method.is_ours:
        _check(method)
    return method


def _check(method: Method) -> None:
    """Refuse settings now that `LLM` would refuse after all is loaded."""
    names = {entry.name for entry in fields(EngineConfig)} - {"max_model_len"}
    try:
        settings = method.settings
        EngineConfig(max_model_len=2, **{name: value for name, value in settings.items() if name in names})
    except ValueError as error:
        raise ValueError(f"--methods {method.name}: {error}") from error


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(keys) or "none"
