"""Counters of speculative decoding, and where its time goes. Counters are stored; every ratio is derived."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(slots=True)
class DecodingStats:
    """What rounds did, for one request or summed over an engine.

    >>> stats = DecodingStats()
    >>> stats.count_round(num_draft_tokens=4, num_accepted_tokens=3, num_output_tokens=4)
    >>> stats.count_round(num_draft_tokens=0, num_accepted_tokens=0, num_output_tokens=1)
    >>> stats.num_rounds, stats.num_output_tokens, stats.acceptance_rate, stats.mean_acceptance_length
    (2, 5, 0.75, 4.0)
    >>> stats.acceptance_by_position
    [1.0, 1.0, 1.0, 0.0]
    """

    num_rounds: int = 0
    """Rounds that a row took part in; each gave at least one token."""
    num_drafts: int = 0
    """Rounds in which the row had at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that are in the output. Tokens behind the end of the request are not counted."""
    num_output_tokens: int = 0
    num_waited_rounds: int = 0
    """Rounds that a row sat out, in EXSPEC's pool, while others were decoded."""
    num_drafted_at: list[int] = field(default_factory=list)
    """For each place in a draft, from its first token on: rounds that had a draft token there."""
    num_accepted_at: list[int] = field(default_factory=list)
    """Rounds whose draft token at that place was accepted; as long as `num_drafted_at`."""

    def count_round(self, num_draft_tokens: int, num_accepted_tokens: int, num_output_tokens: int) -> None:
        """Count one round of one row."""
        self.num_rounds += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_output_tokens += num_output_tokens
        self.num_drafted_at = _sums(self.num_drafted_at, [1] * num_draft_tokens)
        missed = num_draft_tokens - num_accepted_tokens
        self.num_accepted_at = _sums(self.num_accepted_at, [1] * num_accepted_tokens + [0] * missed)

    def add(self, other: DecodingStats) -> None:
        """Add the counters of another."""
        self.num_rounds += other.num_rounds
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_output_tokens += other.num_output_tokens
        self.num_waited_rounds += other.num_waited_rounds
        # New lists: those of a copy are shared with what it is a copy of.
        self.num_drafted_at = _sums(self.num_drafted_at, other.num_drafted_at)
        self.num_accepted_at = _sums(self.num_accepted_at, other.num_accepted_at)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, without the bonus token; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per drafted round, the next token included: 1 + accepted / drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each place in a draft: accepted / drafted tokens there. A token counts as drafted behind a rejected
        one, too, so that the figures fall from place to place."""
        pairs = zip(self.num_accepted_at, self.num_drafted_at, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]


def _sums(ones: list[int], others: list[int]) -> list[int]:
    """Place by place, as far as the longer one goes.

    >>> _sums([2, 1], [1, 1, 1])
    [3, 2, 1]
    """
    return [one + other for one, other in zip_longest(ones, others, fillvalue=0)]


@dataclass(slots=True)
class EngineStats(DecodingStats):
    """The counters of all requests of an engine, and those that only an engine has."""

    num_steps: int = 0
    """Rounds of a batch: one target forward pass each."""
    num_row_rounds: int = 0
    """Rows that those rounds had room for: `max_num_seqs` each."""
    num_grouped_steps: int = 0
    """Rounds in which all rows were equally long, so that a rectangle needs no padding."""
    num_prefilled_tokens: int = 0

    @property
    def grouping_rate(self) -> float:
        """Share of rounds whose rows were equally long: of EXSPEC's, those formed without realignment."""
        return self.num_grouped_steps / self.num_steps if self.num_steps else 0.0

    @property
    def occupancy(self) -> float:
        """Share of row-rounds that served a live sequence."""
        return self.num_rounds / self.num_row_rounds if self.num_row_rounds else 0.0

    @property
    def mean_step_tokens(self) -> float:
        """Tokens that a round computes, N: of each row its newest one and its drafts; padding is not counted."""
        return (self.num_rounds + self.num_draft_tokens) / self.num_steps if self.num_steps else 0.0


@dataclass
class StageTimer:
    """Seconds of each stage of the rounds. Off until `start`, and then next to free of cost.

    Stages may nest; time is charged to the innermost one only, so that the seconds add up to the whole, under
    its path below the outermost stage. A GPU's work is waited for with `synchronize` (only while the timer is on).

    >>> timer = StageTimer()
    >>> with timer.stage("verify"):
    ...     pass
    >>> dict(timer.seconds)  # it was off
    {}
    >>> timer.start()
    >>> with timer.stage("rest"), timer.stage("draft"), timer.stage("realign"):
    ...     time.sleep(0.01)
    >>> sorted(timer.seconds), timer.seconds["draft/realign"] > timer.seconds["draft"]
    (['draft', 'draft/realign', 'rest'], True)
    """

    synchronize: Callable[[], object] | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    is_on: bool = False
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    def start(self) -> None:
        """Begin anew from zero."""
        self.seconds.clear()
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Within this context time is charged to `name`."""
        return self._timed(name) if self.is_on else _NOT_TIMED

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            try:
                self._charge()
            finally:
                self._open.pop()

    def _charge(self) -> None:
        """Charge the time since the last change of stage to the stage that is open."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        if self._open:
            path = "/".join(self._open[1:]) or self._open[0]
            self.seconds[path] += now - self._since
        self._since = now


_NOT_TIMED = nullcontext()
