import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.layout.packed import pack

rows = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=8).filter(
    lambda rows: any(new for _, new in rows)
)


@given(rows, st.integers(0, 3))
def test_every_token_goes_to_the_slot_behind_those_that_its_row_holds(rows, first_row):
    lengths, num_new = zip(*rows, strict=True)
    step = pack(lengths, num_new, rows=range(first_row, first_row + len(lengths)))
    line = [
        (first_row + row, length + column, row * max(num_new) + column)
        for row, (length, new) in enumerate(rows)
        for column in range(new)
    ]
    got = zip(step.cache_rows.tolist(), step.slots.tolist(), step.grid_index.tolist(), strict=True)
    assert list(got) == line


@given(rows)
def test_last_index_is_each_row_s_last_token_and_num_slots_the_longest_row(rows):
    lengths, num_new = zip(*rows, strict=True)
    step = pack(lengths, num_new)
    last_of_rows = [row for row, new in enumerate(num_new) if new]
    assert step.cache_rows[step.last_index].tolist() == last_of_rows
    assert step.slots[step.last_index].tolist() == [lengths[row] + num_new[row] - 1 for row in last_of_rows]
    assert step.num_slots == max(length + new for length, new in rows)


@given(rows)
def test_a_step_is_full_when_all_rows_add_as_much(rows):
    lengths, num_new = zip(*rows, strict=True)
    assert pack(lengths, num_new).is_full == (len(set(num_new)) == 1)


def test_a_step_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one row must add a token"):
        pack([3, 4], [0, 0])
    with pytest.raises(ValueError, match="at least one row must add a token"):
        pack([], [])


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="equally long, got 2, 1 and 2"):
        pack([3, 4], [1])
