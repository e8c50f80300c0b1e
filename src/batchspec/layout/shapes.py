"""Shapes at which a device computes a token's bits alike, whatever stands beside it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the steps of invariant numerics are padded to.

    >>> shapes = Shapes(token_counts=(2, 4, 8), min_queries=4, query_multiple=1)
    >>> [shapes.num_tokens(count) for count in (1, 2, 3, 8)]
    [2, 2, 4, 8]
    >>> [shapes.num_queries(count) for count in (1, 4, 5)]
    [4, 4, 5]
    """

    token_counts: tuple[int, ...]
    """Tokens of a step, rising: sizes at which all matrix products give a token the same bits, at every place."""
    min_queries: int
    """Queries for each block and kv head, at least (fewer are computed by other code)."""
    query_multiple: int
    """And a multiple of this many."""

    def num_tokens(self, count: int) -> int:
        """The size that a step of `count` tokens is padded to.

        Raises:
            ValueError: there is none that is large enough.
        """
        place = bisect_left(self.token_counts, count)
        if place == len(self.token_counts):
            raise ValueError(f"a step must have at most {self.token_counts[-1]} tokens, got {count}")
        return self.token_counts[place]

    def num_queries(self, count: int) -> int:
        """Queries that so many of a block and kv head are padded to."""
        return padded_to(count, self.min_queries, self.query_multiple)


def padded_to(count: int, least: int, multiple: int) -> int:
    """The next multiple, and at least so many.

    >>> [padded_to(count, least=4, multiple=4) for count in (1, 4, 5)]
    [4, 4, 8]
    """
    return max(least, -(-count // multiple) * multiple)
