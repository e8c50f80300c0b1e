"""EQSPEC's batch and EXSPEC's pool, on keys that say which token they belong to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.layout.packed import pack
from batchspec.layout.padded import Gather
from batchspec.models.padded_cache import PoolCache, RealignedBatch
from batchspec.stats import StageTimer

REJECTED = float("nan")


def keys(tokens):  # [rows][T] -> [rows, 2 heads, T, 1]
    states = torch.tensor(tokens, dtype=torch.float64).unsqueeze(1).unsqueeze(-1)
    return torch.cat([states, -states], dim=1)


def add(batch, lengths, tokens):
    """A forward pass: align to the lengths, append a rectangle of tokens; what the layer then sees."""
    cache = batch.align(lengths)
    seen, values = cache.update(keys(tokens), 10 * keys(tokens), 0)
    assert torch.equal(values.nan_to_num(), 10 * seen.nan_to_num())
    return seen[:, 0, :, 0].tolist()


def test_rows_that_gain_equally_are_not_moved():
    batch = RealignedBatch(StageTimer())
    add(batch, [0, 0], [[10, 11], [20, 21]])
    storage = batch.cache.layers[0].keys.data_ptr()
    batch.align([1, 1])
    assert batch.cache.layers[0].keys.data_ptr() == storage, "cutting off is a view"


def test_one_row_alone_is_never_moved():
    batch = RealignedBatch(StageTimer())
    add(batch, [0], [[10, 11, 12]])
    for length in (1, 2, 3):
        storage = batch.cache.layers[0].keys.data_ptr()
        batch.align([length])
        assert batch.cache.layers[0].keys.data_ptr() == storage
        add(batch, [length], [[10 + length, REJECTED]])


def test_rows_that_gain_unequally_move_and_leave_what_was_rejected_behind():
    batch = RealignedBatch(StageTimer())
    add(batch, [0, 0], [[10, 11, 12], [20, REJECTED, REJECTED]])
    assert add(batch, [3, 1], [[13], [21]]) == [[10, 11, 12, 13], [20, 20, 20, 21]]
    assert add(batch, [4, 2], [[14, 15], [22, REJECTED]])[0] == [10, 11, 12, 13, 14, 15]
    assert add(batch, [6, 3], [[16], [23]]) == [[10, 11, 12, 13, 14, 15, 16], [20, 20, 20, 20, 21, 22, 23]]


def test_a_move_that_is_cut_off_between_two_layers_is_gone_on_with(monkeypatch):
    batch = RealignedBatch(StageTimer())
    cache = batch.align([0, 0])
    for layer in range(3):
        cache.update(keys([[10, 11, 12], [20, 21, 22]]), keys([[10, 11, 12], [20, 21, 22]]), layer)
    calls, gather = [], Gather.__call__

    def interrupted(self, tensor):
        calls.append(tensor)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return gather(self, tensor)

    monkeypatch.setattr(Gather, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch.align([3, 1])
    for layer in batch.align([3, 1]).layers:
        assert layer.keys[:, 0, :, 0].tolist() == layer.values[:, 0, :, 0].tolist() == [[10, 11, 12], [20, 20, 20]]


def test_a_row_computed_alone_joins_the_batch():
    batch = RealignedBatch(StageTimer())
    add(batch, [0], [[10, 11, 12]])
    single = batch.take_row(1, 0)
    single.update(keys([[20, 21, 22, 23]]), 10 * keys([[20, 21, 22, 23]]), 0)
    batch.put_row(1, single)
    assert add(batch, [3, 4], [[13], [24]]) == [[0, 10, 11, 12, 13], [20, 21, 22, 23, 24]]


def test_a_row_is_taken_out_computed_further_and_put_back():
    batch = RealignedBatch(StageTimer())
    add(batch, [0, 0], [[10, 11], [20, 21]])
    single = batch.take_row(1, 1)
    single.update(keys([[25, 26]]), 10 * keys([[25, 26]]), 0)
    batch.put_row(1, single)
    assert add(batch, [2, 3], [[12], [27]]) == [[0, 10, 11, 12], [20, 25, 26, 27]]


def test_the_last_row_takes_the_number_of_a_released_one():
    batch = RealignedBatch(StageTimer())
    add(batch, [0, 0, 0], [[10, 11], [20, 21], [30, 31]])
    batch.release_row(0, 2)
    assert add(batch, [2, 2], [[32], [22]]) == [[30, 31, 32], [20, 21, 22]]
    batch.release_row(1, 1)
    assert add(batch, [3], [[33]]) == [[30, 31, 32, 33]]


@settings(max_examples=60)
@given(st.data())
def test_any_course_of_rounds_arrivals_and_releases_keeps_each_row_s_tokens(data):
    batch = RealignedBatch(StageTimer())
    rows, serial = [], 0
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["arrive", "release", "round", "round"]))
        if kind == "arrive" and len(rows) < 4:
            serial += 1
            rows.append([100 * serial + place for place in range(data.draw(st.integers(0, 5)))])
            if rows[-1]:
                single = batch.take_row(len(rows) - 1, 0)
                single.update(keys([rows[-1]]), 10 * keys([rows[-1]]), 0)
                batch.put_row(len(rows) - 1, single)
        elif kind == "release" and rows:
            row = data.draw(st.integers(0, len(rows) - 1))
            batch.release_row(row, len(rows) - 1)
            rows[row] = rows[-1]
            rows.pop()
        elif kind == "round" and rows:
            width = data.draw(st.integers(1, 4))
            gains = [data.draw(st.integers(1, width)) for _ in rows]
            first = [row[-1] + 1 if row else 7000 + place for place, row in enumerate(rows)]
            new = [
                [start + column if column < gain else REJECTED for column in range(width)]
                for start, gain in zip(first, gains, strict=True)
            ]
            seen = add(batch, [len(row) for row in rows], new)
            for row, line, tokens, gain in zip(rows, seen, new, gains, strict=True):
                assert line[len(line) - width - len(row) : len(line) - width] == row
                assert not any(column != column for column in line[:-width]), "a rejected token was kept"
                row += tokens[:gain]


def pool_add(cache, rows, lengths, new):
    """A forward pass over some rows of a pool; what the layer then sees."""
    step = pack(lengths, [len(tokens) for tokens in new], rows=rows)
    cache.begin(step)
    rectangle = [tokens + [REJECTED] * (step.num_columns - len(tokens)) for tokens in new]
    seen, values = cache.update(keys(rectangle), 10 * keys(rectangle), 0)
    assert torch.equal(values, 10 * seen)
    return seen[:, 0, :, 0].tolist()


def test_a_pool_gives_out_any_of_its_rows_ending_at_one_column():
    cache = PoolCache(8, 64, StageTimer())
    pool_add(cache, [5], [0], [[50, 51, 52]])
    pool_add(cache, [2], [0], [[20]])
    assert pool_add(cache, [5, 2], [3, 1], [[53], [21]]) == [[50, 51, 52, 53], [20, 20, 20, 21]]
    assert pool_add(cache, [2], [2], [[22, 23]]) == [[20, 21, 22, 23]]
    assert pool_add(cache, [2, 5], [4, 4], [[24], [54]]) == [[20, 21, 22, 23, 24], [50, 51, 52, 53, 54]]


def test_rows_of_equal_length_side_by_side_are_read_in_place():
    cache = PoolCache(4, 64, StageTimer())
    step = pack([0, 0], [2, 2], rows=[1, 2])
    cache.begin(step)
    seen, _ = cache.update(keys([[10, 11], [20, 21]]), keys([[10, 11], [20, 21]]), 0)
    assert seen.untyped_storage().data_ptr() == cache.keys[0].untyped_storage().data_ptr()


def test_a_pool_holds_each_token_once():
    """Its tensors have one slot for each row and token, whatever was grouped with what."""
    cache = PoolCache(8, 32, StageTimer())
    for row in range(8):
        pool_add(cache, [row], [0], [[row * 100 + place for place in range(row + 1)]])
    pool_add(cache, [0, 3, 7], [1, 4, 8], [[1], [304], [708]])
    held = cache.keys[0][:, 0, :, 0].flatten().tolist()
    for row in range(1, 8):
        assert held.count(row * 100 + row) == 1
    assert cache.keys[0].shape == (8, 2, 32, 1)


@pytest.mark.parametrize("rows", [[0, 1], [1, 3]])
def test_rows_of_equal_length_and_unequal_drafts_need_no_shift(rows):
    cache = PoolCache(4, 64, StageTimer())
    for row in rows:
        pool_add(cache, [row], [0], [[row * 10, row * 10 + 1]])
    seen = pool_add(cache, rows, [2, 2], [[7, 8, 9], [6]])
    assert seen[0] == [rows[0] * 10, rows[0] * 10 + 1, 7, 8, 9]
    assert seen[1][:3] == [rows[1] * 10, rows[1] * 10 + 1, 6]
