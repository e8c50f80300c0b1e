"""`--candidate SPEC`: which engine is audited, and with which settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchspec.audit.answers import Engine
from batchspec.audit.local_engines import open_assisted, open_batchspec, open_transformers
from batchspec.audit.server_engine import open_server
from batchspec.audit.target import Target
from batchspec.settings import LLM_KEYS, read_value


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to run the target."""

    open: Callable[..., Engine]
    """Takes the target and, by name, the options."""
    keys: tuple[str, ...] = ()
    """What it can be told."""


ENGINES: dict[str, Kind] = {
    "batchspec": Kind(open_batchspec, LLM_KEYS),
    "transformers": Kind(open_transformers),
    "transformers-assisted": Kind(open_assisted, ("model", "num_speculative_tokens")),
    "openai": Kind(open_server, ("model", "timeout", "prompt")),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A candidate as it was asked for."""

    text: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    """By the kind's keys; of a server its `url`, too, up to and without `/completions`."""


def parse_spec(text: str) -> Spec:
    """Read `kind`, `kind:key=value,...` or `openai:URL,key=value,...`.

    >>> parse_spec("batchspec:method=ngram,num_speculative_tokens=4").options
    {'method': 'ngram', 'num_speculative_tokens': 4}

    Raises:
        ValueError: an unknown kind or key, a missing one, or a part that is no `key=value`.
    """
    kind, _, rest = text.partition(":")
    if kind not in ENGINES:
        raise ValueError(f"--candidate must begin with one of {', '.join(ENGINES)}, got {text!r}")
    keys = ENGINES[kind].keys
    parts = [part.strip() for part in rest.split(",")] if rest else []
    options: dict[str, Any] = {}
    if kind == "openai":
        url = parts.pop(0).rstrip("/").removesuffix("/completions") if parts else ""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--candidate {text!r} must name a URL: openai:http://host:port/v1,model=NAME")
        options["url"] = url if url.endswith("/v1") or url.count("/") > 2 else f"{url}/v1"
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in keys or key in options:
            allowed = ", ".join(keys) or "none"
            raise ValueError(f"--candidate {text!r}: {part!r} must be key=value, once each; keys are {allowed}")
        options[key] = value if key == "model" else read_value(value)
    count = options.get("num_speculative_tokens", 1)
    if kind == "transformers-assisted" and (type(count) is not int or count < 1):
        raise ValueError(f"--candidate {text!r}: num_speculative_tokens must be an integer of at least 1")
    if kind == "openai" and not options.get("model"):
        raise ValueError(f"--candidate {text!r} must name the server's model: openai:URL,model=NAME")
    if options.get("prompt", "ids") not in ("ids", "text") or not _is_time(options.get("timeout", 1)):
        raise ValueError(
            f"--candidate {text!r}: prompt must be ids or text, and timeout a number of seconds above 0"
        )
    return Spec(text, kind, options)


def open_engine(target: Target, spec: Spec) -> Engine:
    """The engine of a candidate.

    Raises:
        ValueError: its settings cannot be used, or its model not be loaded.
    """
    return ENGINES[spec.kind].open(target, **spec.options)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
