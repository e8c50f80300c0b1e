"""Each token meets all blocks of its row, once, in whatever part of the step it attends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.layout import block_step
from batchspec.layout.block_step import draft_columns, is_worth_two_parts, lay_out_attention
from batchspec.layout.blocks import BlockTable, homes
from batchspec.layout.packed import pack

BLOCK = 4

rows = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6).filter(
    lambda rows: any(new for _, new in rows)
)


def tables(step, order):
    """The rows get their blocks in this order, so that they lie anywhere."""
    table = BlockTable(BLOCK)
    for place in order:
        table.give(table.missing([step.rows[place]], [step.lengths[place] + step.num_new[place]]))
    return table


@given(rows, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_token_meets_its_row(rows, shuffle, are_parts_cheap):
    lengths, num_new = map(list, zip(*rows, strict=True))
    numbers = shuffle.sample(range(20), len(rows))
    step = pack(lengths, num_new, rows=numbers)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    table = tables(step, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_step, "READ_COST", -100)
        patch.setattr(block_step, "PART_COST", 0 if are_parts_cheap else 1 << 20)
        layout = lay_out_attention(step, table)
    assert len(layout.parts) == 1 + (are_parts_cheap and max(num_new) > 1)
    pool = torch.arange(table.num_blocks).view(-1, 1, 1, 1)
    read = [part.read(pool).flatten().tolist() for part in layout.parts]
    order = list(range(step.num_tokens)) if layout.order is None else layout.order.tolist()
    token_at = [order.index(place) for place in layout.tokens.tolist()]
    met = [[] for _ in range(step.num_tokens)]
    for token, (place, block, column) in zip(token_at, layout.meetings.T.tolist(), strict=True):
        part = layout.parts[place]
        assert int(part.queries[block, column]) == token
        assert int(part.positions[block, column]) == int(step.slots[token])
        assert int(part.first_slots[block]) == BLOCK * len(met[token])
        met[token].append(read[place][block])
    assert met == [table.rows[int(row)] for row in step.cache_rows]
    assert layout.counts == tuple(
        sum(len(blocks) > number for blocks in met) for number in range(max(map(len, met)))
    )


def test_tokens_are_written_where_their_row_lives():
    step = pack([3, 7], [3, 1], rows=[2, 0])
    table = tables(step, [1, 0])
    blocks, places = homes(step, table)
    assert table.rows == {0: [0, 1], 2: [2, 3]}
    assert (blocks.tolist(), places.tolist()) == ([2, 3, 3, 1], [3, 0, 1, 3])


def test_a_few_long_drafts_attend_by_themselves_and_short_ones_of_all_rows_do_not():
    assert is_worth_two_parts(num_blocks=100, num_drafting=3, num_columns=9)
    assert not is_worth_two_parts(num_blocks=100, num_drafting=100, num_columns=2)
    assert not is_worth_two_parts(num_blocks=4, num_drafting=1, num_columns=9)
    assert draft_columns(100, 0, 1) == 0
