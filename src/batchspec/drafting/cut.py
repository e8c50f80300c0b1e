"""Which of a batch's draft tokens to verify, by what they promise and what they cost: the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from batchspec.drafting.costs import StepCosts
from batchspec.layout.block_step import draft_columns
from batchspec.layout.blocks import BLOCK
from batchspec.request import Sequence

WANTED = 1.02
"""What drafts have to promise, of the rate without: the best of many estimates is never quite what comes."""


def best_cut(
    survivals: Rows[Rows[float]],
    costs: StepCosts,
    seconds_before: float = 0.0,
    blocks: Rows[int] | None = None,
) -> list[int]:
    """How many candidates of each row to verify, so that tokens per second are most (nearly so, where rows hold
    unequal numbers of blocks); none, unless that promises a little more than the rate without.

    `survivals` fall along each row, so those of highest survival are always the first ones of their rows. As wide
    rows cost more, each limit of the columns is tried. `blocks` are those that each row holds; None: one each.

    Two rows, the second of which has good candidates; each token of the step costs 0.2 of a step of one:

    >>> costs = StepCosts([(1, 1.0), (11, 3.0)])
    >>> best_cut([[0.3, 0.1], [0.9, 0.8, 0.3]], costs)  # (2 + 0.9 + 0.8) / 1.6 is more than with a third
    [0, 2]
    """
    num_rows = len(survivals)
    blocks = blocks or [1] * num_rows
    num_blocks, more_blocks = sum(blocks), sum(blocks) - num_rows
    ranked = sorted(
        (-survival, column, place) for place, row in enumerate(survivals) for column, survival in enumerate(row)
    )
    best = WANTED * num_rows / (seconds_before + costs.seconds(num_rows, more_blocks))
    chosen: list[tuple[float, int, int]] = []
    for most_columns in range(1, 1 + max(map(len, survivals), default=0)):
        candidates = [candidate for candidate in ranked if candidate[1] < most_columns]
        gained, num_drafting, widest = float(num_rows), 0, 0
        for count, (negative, column, place) in enumerate(candidates, start=1):
            gained -= negative
            num_drafting += 0 if column else blocks[place]
            widest = max(widest, column + 1)
            added = draft_columns(num_blocks, num_drafting, 1 + widest)
            rate = gained / (seconds_before + costs.seconds(num_rows + count, more_blocks, added))
            if rate > best:
                best, chosen = rate, candidates[:count]
    taken = [0] * num_rows
    for *_, place in chosen:
        taken[place] += 1
    return taken


def blocks_of(rows: Rows[Sequence]) -> list[int]:
    """Blocks of the cache that each row needs for its newest token."""
    return [1 + row.length // BLOCK for row in rows]


def expected_gain(ahead: Rows[tuple[float, float]], price: float) -> float:
    """Output tokens that a draft token adds, less what its time would yield, if it is verified only where that is
    positive. Its survival is not known yet: `ahead` holds those that it may have, and how likely each is.

    >>> round(expected_gain([(0.2, 0.5), (0.8, 0.5)], price=0.6), 6)
    0.1
    """
    return sum(share * max(0.0, survival - price) for survival, share in ahead)


def doubling(most: int) -> list[int]:
    """Counts to try, where trying all would take too long.

    >>> doubling(11)
    [1, 2, 4, 8, 11]
    """
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def step_seconds(costs: StepCosts, blocks: Rows[int], num_draft_tokens: Rows[int]) -> float:
    """Expected seconds of a step in which each row has its newest token and so many drafts."""
    num_drafting = sum(own for own, count in zip(blocks, num_draft_tokens, strict=True) if count)
    added = draft_columns(sum(blocks), num_drafting, 1 + max(num_draft_tokens))
    return costs.seconds(len(blocks) + sum(num_draft_tokens), sum(blocks) - len(blocks), added)
