"""What a request has given: plain data for those who asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from batchspec.stats import DecodingStats

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """How probable a token was at its position."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """1 for the most probable token. The token that stands at the position has the last rank of those that are
    as probable as it."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


TokenLogprobs = dict[int, Logprob]
"""By token id: the token that stands at the position first, then the most probable ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a request."""

    index: int
    """0 to n - 1."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """"stop": an end token or stop string; "length": budget or context is used up; None: still running."""
    stop_reason: int | str | None
    """The stop token's id or the stop string that ended the text; None for the model's own end tokens."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None if they were not asked for."""
    logprobs: list[TokenLogprobs] | None = None
    """For each of `token_ids`; None if not asked for."""


@dataclass(slots=True)
class RequestMetrics(DecodingStats):
    """How a request's tokens came about; the only part of an output that speculation may change."""

    accepted: list[bool] = field(default_factory=list)
    """For each output token: True if it is an accepted draft token, False if it is the target's own. With `n`
    above 1, answer after answer."""


@dataclass(slots=True)
class RequestOutput:
    """What a request has given so far; the whole answer once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """`n` of them."""
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """For each token of the prompt (None for the first, which nothing predicts); None if not asked for."""


def common_prefix(first: list[int], second: list[int]) -> int:
    """Tokens that two outputs share from the start on.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 3]), common_prefix([], [1])
    (2, 0)
    """
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
