"""The padded layout against the obvious one: lists that are unpadded, appended to and padded again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.layout.packed import pack
from batchspec.layout.padded import Gather, lay_out, left_padding, source_columns

PAD = -1
rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8
).filter(lambda rows: any(new for _, new, _ in rows))
"""Tokens held, tokens that a step adds, and how many of those are kept."""


def padded(contents):
    longest = max(map(len, contents))
    return [[PAD] * (longest - len(content)) + content for content in contents]


def content(row, length):
    return [100 * row + place for place in range(length)]


@given(rows)
def test_padding_and_content_are_as_wide_as_the_longest_row(rows):
    lengths = [held for held, _, _ in rows]
    assert [padding + length for padding, length in zip(left_padding(lengths), lengths, strict=True)] == [
        max(lengths)
    ] * len(rows)


@given(rows)
def test_mask_and_positions_are_those_of_rows_that_are_padded_by_hand(rows):
    lengths, num_new = [held for held, _, _ in rows], [new for _, new, _ in rows]
    layout = lay_out(pack(lengths, num_new))
    columns = max(num_new)
    past = padded([content(row, held) for row, held in enumerate(lengths)])
    for row, (held, new) in enumerate(zip(lengths, num_new, strict=True)):
        assert layout.mask[row].tolist() == [int(token != PAD) for token in past[row]] + [1] * columns
        real = list(range(held, held + new))
        beyond = [max(0, held + new - 1)] * (columns - new)  # no token sees these places
        assert layout.position_ids[row].tolist() == real + beyond


@given(rows)
def test_a_position_is_the_number_of_tokens_before_it_in_the_mask(rows):
    """pos == max(0, cumsum(non-pad) - 1), at every place that holds a token."""
    lengths, num_new = [held for held, _, _ in rows], [new for _, new, _ in rows]
    layout = lay_out(pack(lengths, num_new))
    counted = (layout.mask.cumsum(dim=1) - 1).clamp(min=0)[:, max(lengths) :]
    for row, new in enumerate(num_new):
        assert layout.position_ids[row, :new].tolist() == counted[row, :new].tolist()


@given(rows)
def test_realigning_is_unpadding_appending_and_padding_again(rows):
    """A round adds `new` tokens to each row, of which `kept` are accepted: offset L' - L - a, for everything."""
    held = [length for length, _, _ in rows]
    kept = [min(new, kept) for _, new, kept in rows]
    lengths = [length + gain for length, gain in zip(held, kept, strict=True)]
    shift = [max(lengths) - max(held) - gain for gain in kept]
    padding = zip(left_padding(held), left_padding(lengths), strict=True)
    assert [new - old for old, new in padding] == shift
    if max(lengths) == 0:
        return
    width = max(new for _, new, _ in rows)
    before = [
        line + [PAD - 1] * width for line in padded([content(row, length) for row, length in enumerate(held)])
    ]
    for row, (length, gain) in enumerate(zip(held, kept, strict=True)):
        before[row][max(held) : max(held) + gain] = content(row, length + gain)[length:]
    wanted = padded([content(row, length) for row, length in enumerate(lengths)])
    columns = source_columns(left_padding(held), lengths).tolist()
    for row, line in enumerate(wanted):
        for column, token in enumerate(line):
            if token != PAD:
                assert before[row][columns[row][column]] == token
                assert column - columns[row][column] == shift[row]
            elif lengths[row]:
                assert before[row][columns[row][column]] == content(row, 1)[0], "padding repeats a real token"


@pytest.mark.parametrize("heads", [1, 3])
def test_gather_takes_columns_of_rows_for_all_heads(heads):
    tensor = torch.randn(4, heads, 6, 5)
    rows, columns = torch.tensor([2, 0, 2]), torch.tensor([[1, 1], [5, 0], [3, 4]])
    gather = Gather(rows, columns)
    wanted = torch.stack([tensor[row][:, line] for row, line in zip(rows, columns, strict=True)])
    assert torch.equal(gather(tensor), wanted)
    assert torch.equal(gather(2 * tensor), 2 * wanted)
    wider = torch.cat([tensor, tensor], dim=2)
    assert torch.equal(gather(wider), wanted)
