"""A request in work: its candidates and how far each is. No model, no tokenizer, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchspec.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from batchspec.sampling_params import SamplingParams
from batchspec.stats import DecodingStats

RECENT = 16
"""Output tokens by which `Sequence.recent_acceptance` judges."""

TokenWatch = Callable[[int], str | None]
"""Called with each output token that becomes text; returns the stop string that it completed, if any."""


class Grammar(Protocol):
    """The form that an output has to follow (`sampling/grammar.py`)."""

    def num_valid(self, output_token_ids: list[int], draft: list[int]) -> int:
        """How many draft tokens may follow the output, from the first on."""
        ...

    def allowed(self, output_token_ids: list[int], draft: list[int]) -> Any:
        """The tokens that may follow the output, and those that may follow each draft token behind it."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One candidate of a request. `length` is the state; the rest of a row's layout is derived from it.

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
    seed: int = 0
    """Of the request's noise; together with `index` it names a stream of its own."""
    siblings: list[Sequence] = field(default_factory=list)
    """All candidates of the request (`n`), this one included, in one list that they share."""
    grammar: Grammar | None = None
    length: int = 0
    """Tokens of this sequence in the target's cache."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)
    accepted: list[bool] = field(default_factory=list)
    """For each output token: was it an accepted draft token (or the target's own)?"""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For each output token, if the request asks for them."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """For each prompt token, if the request asks for them; kept by its first candidate."""
    waited: int = 0
    """Rounds since it last took part in one (EXSPEC's pool)."""
    index: int = field(init=False)
    """Its place among the siblings."""

    def __post_init__(self) -> None:
        self.index = len(self.siblings)
        self.siblings.append(self)

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
    def num_unfinished(self) -> int:
        """Candidates of the request that are still waiting or running."""
        return sum(not sibling.is_finished for sibling in self.siblings)

    @property
    def is_request_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def is_aborted(self) -> bool:
        """Was the request ended from outside, in one of its candidates at least?"""
        return any(sibling.finish_reason == "abort" for sibling in self.siblings)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Are they asked for, and not there yet?"""
        return self.params.prompt_logprobs is not None and not self.siblings[0].prompt_logprobs

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

    def append(self, token_id: int, accepted: bool, logprobs: TokenLogprobs | None = None) -> None:
        """Commit one token and decide whether it ends the request: the only place where requests end by
        themselves, one token at a time, so that it makes no difference how many came in one round.

        The watch comes first, as it may raise, and then the token is not committed.
        """
        is_eos, is_stop = token_id in self.eos_token_ids, token_id in self.params.stop_ids
        matched = None
        if self.watch is not None and (self.params.include_stop_str_in_output or not (is_eos or is_stop)):
            matched = self.watch(token_id)
        place = self.num_output_tokens
        self.accepted[place:] = [accepted]
        if logprobs is not None:
            self.logprobs[place:] = [logprobs]
        self.token_ids.append(token_id)  # last: what says that the token is there
        if self.is_finished:  # aborted by its own watch
            return
        if is_eos or is_stop or matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = None if is_eos else token_id if is_stop else matched
        elif len(self.token_ids) >= self.max_length:
            self.finish_reason = "length"

    def to_output(self) -> RequestOutput:
        """A snapshot of the whole request, which later rounds do not change; without text, as the engine knows
        none."""
        accepted = [flag for one in self.siblings for flag in one.accepted[: one.num_output_tokens]]
        metrics = RequestMetrics(accepted=accepted)
        for sibling in self.siblings:
            metrics.add(sibling.stats)
        return RequestOutput(
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            outputs=[sibling._to_completion() for sibling in self.siblings],
            finished=self.is_request_finished,
            metrics=metrics,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.siblings[0].prompt_logprobs,
        )

    def _to_completion(self) -> CompletionOutput:
        wanted = self.params.logprobs is not None
        logprobs = self.logprobs[: self.num_output_tokens]
        chosen = zip(self.output_token_ids, logprobs, strict=True) if wanted else ()
        return CompletionOutput(
            index=self.index,
            text="",
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=sum(entry[token].logprob for token, entry in chosen) if wanted else None,
            logprobs=logprobs if wanted else None,
        )
