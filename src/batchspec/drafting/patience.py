"""When it is time to try drafts again that did not pay."""

from __future__ import annotations

from dataclasses import dataclass

PROBE_AFTER, PROBE_LAST = 32, 512
"""Rounds without a draft before one is tried all the same. In vain, the next try comes after twice as many."""


@dataclass(slots=True)
class Patience:
    """Says now and then that it is time for a try."""

    num_idle: int = 0
    limit: int = PROBE_AFTER

    @property
    def is_over(self) -> bool:
        return self.num_idle >= self.limit

    def wait(self) -> None:
        """One more round without a draft."""
        self.num_idle += 1

    def try_now(self) -> None:
        self.num_idle, self.limit = 0, min(2 * self.limit, PROBE_LAST)

    def reset(self) -> None:
        self.num_idle, self.limit = 0, PROBE_AFTER
