"""Which of a batch's draft tokens to verify, by what they promise and what they cost: the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

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
    ranked = sorted(
        (-survival, column, place) for place, row in enumerate(survivals) for column, survival in enumerate(row)
    )
    if not ranked:
        return [0] * num_rows
    blocks = blocks or [1] * num_rows
    column, place = (np.array(values) for values in list(zip(*ranked, strict=True))[1:])  # [C] each
    survival = -np.array([first for first, *_ in ranked])
    # Of each limit, one row: what holds when the candidates up to each have been taken, as far as it allows them.
    allowed = column < np.arange(1, 2 + column.max())[:, None]  # [limits, C]
    counts = allowed.cumsum(axis=1)
    gained = num_rows + (allowed * survival).cumsum(axis=1)
    num_drafting = (allowed * (column == 0) * np.array(blocks)[place]).cumsum(axis=1)
    widest = np.maximum.accumulate(allowed * (column + 1), axis=1)
    num_blocks, more_blocks = sum(blocks), sum(blocks) - num_rows
    by_count = np.array([costs.seconds(num_rows + count, more_blocks) for count in range(1 + len(ranked))])
    attention = costs.seconds_per_column * draft_columns(num_blocks, num_drafting, 1 + widest)
    rates = allowed * gained / (seconds_before + by_count[counts] + attention)
    limit, last = np.unravel_index(rates.argmax(), rates.shape)
    if rates[limit, last] <= WANTED * num_rows / (seconds_before + by_count[0]):
        return [0] * num_rows
    taken = place[: last + 1][allowed[limit, : last + 1]]
    return np.bincount(taken, minlength=num_rows).tolist()


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
    added = int(draft_columns(sum(blocks), num_drafting, 1 + max(num_draft_tokens)))
    return costs.seconds(len(blocks) + sum(num_draft_tokens), sum(blocks) - len(blocks), added)
