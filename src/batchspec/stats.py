"""Counters of speculative decoding. Counters are stored; every ratio is derived from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DecodingStats:
    """What rounds did, for one request or summed over an engine.

    >>> stats = DecodingStats()
    >>> stats.count_round(num_draft_tokens=4, num_accepted_tokens=3, num_output_tokens=4)
    >>> stats.count_round(num_draft_tokens=0, num_accepted_tokens=0, num_output_tokens=1)
    >>> stats.num_rounds, stats.num_output_tokens, stats.acceptance_rate, stats.mean_acceptance_length
    (2, 5, 0.75, 4.0)
    """

    num_rounds: int = 0
    """Rounds that a row took part in; each gave at least one token."""
    num_drafts: int = 0
    """Rounds in which the row had at least one draft token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that are in the output. Tokens behind the end of the request are not counted."""
    num_output_tokens: int = 0

    def count_round(self, num_draft_tokens: int, num_accepted_tokens: int, num_output_tokens: int) -> None:
        """Count one round of one row."""
        self.num_rounds += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        self.num_output_tokens += num_output_tokens

    def add(self, other: DecodingStats) -> None:
        """Add the counters of another."""
        self.num_rounds += other.num_rounds
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_output_tokens += other.num_output_tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, without the bonus token; 0.0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per drafted round, the next token included: 1 + accepted / drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


@dataclass(slots=True)
class EngineStats(DecodingStats):
    """The counters of all requests of an engine, and those that only an engine has."""

    num_steps: int = 0
    """Rounds of the whole batch: one target forward pass each."""
    num_row_rounds: int = 0
    """Rows that those rounds had room for: `max_num_seqs` each."""
    num_prefilled_tokens: int = 0

    @property
    def occupancy(self) -> float:
        """Share of row-rounds that served a live sequence."""
        return self.num_rounds / self.num_row_rounds if self.num_row_rounds else 0.0
