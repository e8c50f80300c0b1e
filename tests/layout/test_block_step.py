"""Each token meets all blocks of its row, once, in whatever part of the step it attends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.layout import block_step
from batchspec.layout.block_step import draft_columns, is_worth_two_calls, lay_out_attention
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
def test_every_token_meets_its_row(rows, shuffle, are_calls_cheap):
    lengths, num_new = map(list, zip(*rows, strict=True))
    numbers = shuffle.sample(range(20), len(rows))
    step = pack(lengths, num_new, rows=numbers)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    table = tables(step, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_step, "READ_COST", -100)
        patch.setattr(block_step, "CALL_COST", 0 if are_calls_cheap else 1 << 20)
        layout = lay_out_attention(step, table)
    assert len(layout.parts) == 1 + (are_calls_cheap and max(num_new) > 1)
    pool = torch.arange(table.num_blocks).view(-1, 1, 1, 1)
    met = []
    for place, part in enumerate(layout.parts):
        line = layout.lines[place] if layout.lines else torch.arange(step.num_tokens)
        blocks = part.read(pool).flatten()
        in_order = [chosen.tolist() for chosen in part.in_order.split(part.counts)]
        for index in range(len(line)):
            rank, column = divmod(int(part.grid_index[index]), part.num_columns)
            for chosen in [chosen[rank] for chosen in in_order if rank < len(chosen)]:
                assert int(part.queries[chosen, column]) == index
                assert int(part.positions[chosen, column]) == int(step.slots[line[index]])
            owned = [int(blocks[chosen[rank]]) for chosen in in_order if rank < len(chosen)]
            assert [int(part.rows[chosen[rank]]) for chosen in in_order if rank < len(chosen)] == [rank] * len(
                owned
            )
            assert {int(blocks[block]) for block in part.row_blocks[rank]} == set(owned)
            met.append((int(line[index]), owned))
    assert [token for token, _ in met] == (layout.order.argsort().tolist() if layout.lines else [*range(len(met))])
    for token, owned in met:
        assert owned == table.rows[int(step.cache_rows[token])]


def test_tokens_are_written_where_their_row_lives():
    step = pack([3, 7], [3, 1], rows=[2, 0])
    table = tables(step, [1, 0])
    blocks, places = homes(step, table)
    assert table.rows == {0: [0, 1], 2: [2, 3]}
    assert (blocks.tolist(), places.tolist()) == ([2, 3, 3, 1], [3, 0, 1, 3])


def test_a_few_long_drafts_attend_by_themselves_and_short_ones_of_all_rows_do_not():
    assert is_worth_two_calls(num_blocks=100, num_drafting=3, num_columns=9)
    assert not is_worth_two_calls(num_blocks=100, num_drafting=100, num_columns=2)
    assert not is_worth_two_calls(num_blocks=4, num_drafting=1, num_columns=9)
    assert draft_columns(100, 0, 1) == 0
