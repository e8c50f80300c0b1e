"""Plain data of a request: what was asked, how far it is, what came out. No model, no tokenizer, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from batchspec.stats import DecodingStats

FinishReason = Literal["stop", "length", "abort"]

RECENT = 16
"""Output tokens by which `Sequence.recent_acceptance` judges."""

TokenWatch = Callable[[int], str | None]
"""Called with each output token that becomes text; returns the stop string that it completed, if any."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Names and meanings are vLLM's (whose default temperature is 1.0).

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    temperature: float = 0.0
    """0.0, greedy decoding, is the only value that this version knows."""
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
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ValueError(f"temperature must be 0.0 (greedy decoding), got {self.temperature!r}")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise ValueError(f"max_tokens must be an integer of at least 1 or None, got {self.max_tokens!r}")
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise ValueError(f"min_tokens must be an integer of at least 0, got {self.min_tokens!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if not all(isinstance(string, str) and string for string in self.stop_strings):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}")
        if not all(_is_int(token) and token >= 0 for token in self.stop_ids):
            raise ValueError(f"stop_token_ids must be a list of token ids (0 or more), got {self.stop_ids!r}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it was normalised: always a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as it was normalised: always a tuple."""
        return cast("tuple[int, ...]", self.stop_token_ids)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """None is nothing, a list is itself, anything else is a list of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in work. `length` is the state; the rest of a row's layout is derived from it.

    Between rounds `length == len(token_ids) - 1`: all tokens are in the cache but the newest, whose keys and
    values the next round computes together with its drafts.
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    """Prompt and output; the committed tokens, never a draft."""
    num_prompt_tokens: int
    max_length: int
    """Committed tokens at which the request ends for `length`: its budget or the context window."""
    eos_token_ids: frozenset[int] = frozenset()
    watch: TokenWatch | None = None
    length: int = 0
    """Tokens of this sequence in the target's cache."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)
    accepted: list[bool] = field(default_factory=list)
    """For each output token: was it an accepted draft token (or the target's own)?"""
    waited: int = 0
    """Rounds since it last took part in one (EXSPEC's pool)."""

    @property
    def recent_acceptance(self) -> float:
        """Share of accepted draft tokens among the last output tokens."""
        recent = self.accepted[-RECENT:]
        return sum(recent) / len(recent) if recent else 0.0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end this request."""
        return self.eos_token_ids.union(self.params.stop_ids)

    @property
    def num_tokens_before_end(self) -> int:
        """Output tokens still to come before an end token may be chosen (`min_tokens`)."""
        return max(0, self.params.min_tokens - self.num_output_tokens)

    def draft_limit(self, num_speculative_tokens: int) -> int:
        """Draft tokens of use to this row now: with the next token they may fill its budget, not pass it."""
        return max(0, min(num_speculative_tokens, self.max_length - len(self.token_ids) - 1))

    def append(self, token_id: int, accepted: bool) -> None:
        """Commit one token and decide whether it ends the request: the only place where requests end by
        themselves, one token at a time, so that it makes no difference how many came in one round.

        The watch comes first, as it may raise, and then the token is not committed.
        """
        is_eos, is_stop = token_id in self.eos_token_ids, token_id in self.params.stop_ids
        matched = None
        if self.watch is not None and (self.params.include_stop_str_in_output or not (is_eos or is_stop)):
            matched = self.watch(token_id)
        self.token_ids.append(token_id)
        self.accepted.append(accepted)
        if self.is_finished:  # aborted by its own watch
            return
        if is_eos or is_stop or matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = None if is_eos else token_id if is_stop else matched
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

    def to_output(self) -> RequestOutput:
        """A snapshot that later rounds do not change; without text, as the engine knows none."""
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        metrics = RequestMetrics(accepted=list(self.accepted))
        metrics.add(self.stats)
        return RequestOutput(
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            outputs=[completion],
            finished=self.is_finished,
            metrics=metrics,
        )


@dataclass(slots=True)
class RequestMetrics(DecodingStats):
    """How a request's tokens came about; the only part of an output that speculation may change."""

    accepted: list[bool] = field(default_factory=list)
    """For each output token: True if it is an accepted draft token, False if it is the target's own."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a request."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """"stop": an end token or stop string; "length": budget or context is used up; None: still running."""
    stop_reason: int | str | None
    """The stop token's id or the stop string that ended the text; None for the model's own end tokens."""


@dataclass(slots=True)
class RequestOutput:
    """What a request has given so far; the whole answer once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
