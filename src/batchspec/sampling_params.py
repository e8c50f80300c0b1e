"""How one request is decoded: plain data, checked where it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, cast

LogitsProcessor = Callable[[list[int], Any], Any]
"""Called as `(token_ids, logits)` for every position, drafted ones too: the output tokens before the position and
its logits `[vocabulary]` (float32 or wider), which it may change or replace. It has to be a function of the two
alone: positions come more than once, in any order, and some are thrown away."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken for 0, as in vLLM."""

GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Names, meanings and defaults are vLLM's.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    n: int = 1
    """Answers to the prompt, which is computed once for all of them. They differ by their noise only."""
    temperature: float = 1.0
    """Logits are divided by it before a token is drawn, 0 to 1e6. 0.0: the most probable token (greedy)."""
    top_p: float = 1.0
    """Draw among the most probable tokens that together hold this much probability, 0 < top_p <= 1."""
    top_k: int = 0
    """Draw among the `top_k` most probable tokens; 0 or -1: among all."""
    min_p: float = 0.0
    """Draw among tokens of at least this share of the most probable one's probability, 0 <= min_p <= 1."""
    seed: int | None = None
    """Fixes the noise of this request, whatever else is in the batch. None (or -1): a seed of its own, made from
    the engine's and the request's serial number."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the output holds it, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or output hold; 1e-6 to 1e6."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100 each."""
    bad_words: Listed[str | Listed[int]] | None = None
    """Words (or token id lists) whose last token is not chosen after the others. Words are looked for both as
    they stand and behind a space, in the output only."""
    allowed_token_ids: Iterable[int] | None = None
    """Choose among these tokens only."""
    max_tokens: int | None = 16
    """Most tokens to give out; `None`: as many as the context window leaves."""
    min_tokens: int = 0
    """Before this many tokens are out, no end token can be chosen and no stop string ends the request."""
    stop: str | Iterable[str] | None = None
    """Strings that end the text. They are not part of it (see `include_stop_str_in_output`)."""
    stop_token_ids: Iterable[int] | None = None
    """Tokens that end the request, like the model's own end tokens. Kept in `token_ids`, not in the text."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text, or the text of the end token if it has one that is shown."""
    logprobs: int | None = None
    """Give the log-probability of each output token, and of the so many most probable ones; -1: of all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the raw logits."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens that are shown; matters with SentencePiece tokenizers only."""
    logits_processors: Listed[LogitsProcessor] | None = None
    """Functions that change logits before all other processors, in this order; see `LogitsProcessor`."""
    structured_outputs: Mapping[str, Any] | None = None
    """Let the text follow a form: one of `{"json": schema}` (a dictionary or its text), `{"regex": ...}`,
    `{"choice": [...]}` or `{"grammar": ...}` (EBNF). Needs the extra `structured` (xgrammar)."""

    def __post_init__(self) -> None:
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        for name in ("bad_words", "stop", "stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_numbers()
        self._check_lists()
        self._check_structured_outputs()
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n must be 1 with temperature 0, which gives the same answer each time, got {self.n}"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it was normalised: always a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as it was normalised: always a tuple."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    @property
    def allowed_ids(self) -> tuple[int, ...]:
        """`allowed_token_ids` as a tuple; empty if all are allowed."""
        return cast("tuple[int, ...]", self.allowed_token_ids or ())

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1)
        _check_float("temperature", self.temperature, 0.0, 1e6)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_is_allowed=False)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None and (not _is_int(self.seed) or not -(1 << 63) <= self.seed < 1 << 64):
            raise ValueError(f"seed must be an integer from -2**63 to 2**64 - 1 or None, got {self.seed!r}")
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise ValueError(f"max_tokens must be an integer of at least 1 or None, got {self.max_tokens!r}")
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1)

    def _check_lists(self) -> None:
        if not all(isinstance(string, str) and string for string in self.stop_strings):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        _check_ids("stop_token_ids", self.stop_ids)
        _check_ids("allowed_token_ids", self.allowed_ids)
        if self.allowed_token_ids is not None and not self.allowed_ids:
            raise ValueError("allowed_token_ids must hold at least one token id; None allows all")
        for word in self.bad_words or ():
            is_text = isinstance(word, str) and word.strip()
            if not is_text and not (isinstance(word, list | tuple) and word and all(map(_is_token_id, word))):
                raise ValueError(f"bad_words must be words or token id lists, none empty, got {word!r}")
        if not all(map(callable, self.logits_processors or ())):
            raise ValueError(f"logits_processors must be a list of functions, got {self.logits_processors!r}")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or not all(map(_is_token_id, self.logit_bias)):
            raise ValueError(f"logit_bias must map token ids (0 or more) to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _check_float(f"logit_bias of token {token}", bias, -100.0, 100.0)

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if form is None:
            return
        if not isinstance(form, Mapping) or len(form) != 1 or next(iter(form)) not in GRAMMAR_KINDS:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(GRAMMAR_KINDS)}, got {form!r}"
            )
        kind, value = next(iter(form.items()))
        if kind == "choice":
            if (
                not isinstance(value, list | tuple)
                or not value
                or not all(isinstance(c, str) and c for c in value)
            ):
                raise ValueError(f"structured_outputs choice must be a list of non-empty strings, got {value!r}")
        elif not isinstance(value, str) and not (kind == "json" and isinstance(value, Mapping)):
            allowed = "a schema, as a dictionary or text" if kind == "json" else "a string"
            raise ValueError(f"structured_outputs {kind} must be {allowed}, got {value!r}")
        if self.min_tokens:
            raise ValueError("min_tokens must be 0 with structured_outputs, whose form says when the text ends")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """None is nothing, a list is itself, anything else is a list of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _check_ids(name: str, value: tuple[Any, ...]) -> None:
    if not all(map(_is_token_id, value)):
        raise ValueError(f"{name} must be a list of token ids (0 or more), got {value!r}")


def _check_int(name: str, value: Any, low: int) -> None:
    if not _is_int(value) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def _check_float(
    name: str, value: Any, low: float, high: float = math.inf, *, low_is_allowed: bool = True
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not is_number
        or not -sys.float_info.max <= value <= sys.float_info.max
        or not low <= value <= high
        or (value == low and not low_is_allowed)
    ):
        allowed = f"of at least {low}" if low_is_allowed else f"above {low}"
        allowed += f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}")
