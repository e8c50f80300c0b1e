"""Keys and values lie in the slot of their token, in the blocks of its row, and stay there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_states import KEY_SIZE, KV_HEADS, VALUE_SIZE, states_of
from torch import Tensor

from batchspec.layout.packed import PackedStep, pack
from batchspec.models.block_cache import BlockCache
from batchspec.models.slot_cache import SlotCache

BLOCK = 4


def make(num_rows: int, max_slots: int) -> BlockCache:
    cache = BlockCache(num_rows, max_slots)
    cache.table.block_size = BLOCK
    return cache


def write(cache: BlockCache, step: PackedStep, labels: list[float], layer: int = 0) -> tuple[Tensor, Tensor]:
    cache.begin(step)
    return cache.update(*states_of(labels), layer)


def held(cache: BlockCache, row: int, layer: int = 0) -> list[float]:
    """What the row's blocks hold, slot by slot; all channels and heads must agree."""
    blocks = cache.table.rows.get(row, [])
    keys = cache.keys[layer][blocks].transpose(0, 1).flatten(1, 2)  # [kv heads, slots, size]
    values = cache.values[layer][blocks].transpose(0, 1).flatten(1, 2)
    assert torch.equal(keys[:1, :, :1].expand_as(keys), keys), "all channels are the token's"
    assert torch.equal(-keys[:, :, :1].expand_as(values), values)
    return [float(slot) for slot in keys[0, :, 0]]


def test_each_token_goes_to_the_next_slot_of_its_row():
    cache = make(num_rows=3, max_slots=8)
    write(cache, pack([0, 0, 0], [2, 1, 3]), [10, 11, 20, 30, 31, 32])
    keys, values = write(cache, pack([2, 1, 3], [3, 2, 0]), [12, 13, 14, 21, 22])
    assert keys.shape[1:] == (KV_HEADS, BLOCK, KEY_SIZE)
    assert values.shape[1:] == (KV_HEADS, BLOCK, VALUE_SIZE)
    assert len(keys) >= cache.table.num_blocks == 4
    assert held(cache, 0) == [10, 11, 12, 13, 14, 0, 0, 0]
    assert held(cache, 1) == [20, 21, 22, 0]
    assert held(cache, 2) == [30, 31, 32, 0]


def test_a_row_takes_the_blocks_that_it_needs_whatever_its_neighbours_take():
    cache = make(num_rows=2, max_slots=400)
    write(cache, pack([0, 0], [400, 1]), [1] * 401)
    assert [len(cache.table.rows[row]) for row in (0, 1)] == [100, 1]


def test_a_step_over_some_rows_reads_their_blocks_only():
    cache = make(num_rows=3, max_slots=8)
    write(cache, pack([0, 0, 0], [2, 5, 1]), [10, 11, 20, 21, 22, 23, 24, 30])
    step = pack([1, 2], [1, 1], rows=[2, 0])
    (part,) = cache.begin(step).parts
    keys, _ = cache.update(*states_of([31, 12]), 0)
    assert sorted(part.read(keys)[:, 0, 0, 0].tolist()) == [10, 30]
    assert (held(cache, 0)[:3], held(cache, 2)[:2]) == ([10, 11, 12], [30, 31])


def test_rolled_back_slots_are_overwritten_by_the_next_tokens():
    cache = make(num_rows=1, max_slots=8)
    write(cache, pack([0], [4]), [1, 2, 3, 4])
    write(cache, pack([2], [1]), [9])
    assert held(cache, 0)[:3] == [1, 2, 9]


def test_layers_are_kept_apart():
    cache = make(num_rows=1, max_slots=8)
    step = pack([0], [1])
    write(cache, step, [1], layer=0)
    write(cache, step, [2], layer=5)
    assert (held(cache, 0, layer=0)[0], held(cache, 0, layer=5)[0]) == (1, 2)


def test_what_a_step_over_all_rows_reads_is_no_copy():
    cache = make(num_rows=2, max_slots=8)
    (part,) = cache.begin(pack([0, 0], [1, 2])).parts
    keys, _ = cache.update(*states_of([1, 2, 3]), 0)
    assert part.read(keys).untyped_storage().data_ptr() == cache.keys[0].untyped_storage().data_ptr()


def test_a_pool_is_never_larger_than_all_rows_can_be():
    cache = make(num_rows=2, max_slots=10)
    for length in range(10):
        write(cache, pack([length, length], [1, 1]), [1, 2])
    assert len(cache.keys[0]) == 2 * 3


def test_new_blocks_hold_zeros_never_what_another_request_left():
    cache = make(num_rows=2, max_slots=16)
    write(cache, pack([0, 0], [9, 1]), [torch.nan] * 9 + [1])
    cache.clear_row(0)
    write(cache, pack([0, 1], [1, 4]), [1] * 5)
    assert all(torch.isfinite(store[0][: cache.table.num_blocks]).all() for store in (cache.keys, cache.values))


def test_copy_row_copies_the_tokens_of_all_layers_and_no_more():
    cache = make(num_rows=3, max_slots=8)
    step = pack([0, 0, 0], [1, 1, 7])
    for layer in (0, 1):
        write(cache, step, [10, 20, 30, 31, 32, 33, 34, 35, 36], layer)
    cache.copy_row(2, 0, length=6)
    for layer in (0, 1):
        assert held(cache, 0, layer) == [30, 31, 32, 33, 34, 35, 0, 0]
        assert held(cache, 1, layer) == [20, 0, 0, 0]
        assert held(cache, 2, layer)[:7] == [30, 31, 32, 33, 34, 35, 36]


BOTH = pytest.mark.parametrize("kind", [BlockCache, SlotCache])


@BOTH
def test_a_step_beyond_the_rows_is_refused(kind: type[BlockCache | SlotCache]):
    cache = kind(num_rows=2, max_slots=8)
    cache.begin(pack([0], [1], rows=[1]))
    with pytest.raises(ValueError, match="rows must be below 2, got 2"):
        cache.begin(pack([0], [1], rows=[2]))
    with pytest.raises(ValueError, match="rows must be below 2, got 2"):
        cache.begin(pack([0, 0, 0], [1, 1, 1]))


@BOTH
def test_a_step_beyond_the_slots_is_refused(kind: type[BlockCache | SlotCache]):
    cache = kind(num_rows=2, max_slots=8)
    cache.begin(pack([0, 5], [1, 3]))
    with pytest.raises(ValueError, match="a row must have at most 8 tokens, got 9"):
        cache.begin(pack([0, 5], [1, 4]))


@BOTH
def test_writing_needs_a_layout(kind: type[BlockCache | SlotCache]):
    with pytest.raises(RuntimeError, match="begin must be called"):
        kind(num_rows=1, max_slots=8).update(*states_of([1]), 0)


MOST_SLOTS = 20


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int]]]]:
    """A number of rows, and what happens to them: rows add tokens, are rolled back, copied, cleared or renamed."""
    rows = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 5), min_size=rows, max_size=rows)
    pair = st.lists(st.integers(0, rows - 1), min_size=2, max_size=2)
    kinds = st.sampled_from(["add", "add", "roll back"])
    event = st.one_of(st.tuples(kinds, counts), st.tuples(st.sampled_from(["copy", "clear", "replace"]), pair))
    return rows, draw(st.lists(event, max_size=16))


@given(histories())
@settings(max_examples=150, deadline=None)
def test_rows_hold_what_was_committed_whatever_happened(history: tuple[int, list[tuple[str, list[int]]]]):
    num_rows, events = history
    cache = make(num_rows, MOST_SLOTS)
    rows: list[list[float]] = [[] for _ in range(num_rows)]  # the model: plain lists
    label = 0.0
    for kind, numbers in events:
        first, second = (*numbers, 0)[:2]
        if kind == "add":
            counts = [min(n, MOST_SLOTS - len(row)) for n, row in zip(numbers, rows, strict=True)]
            if not any(counts):
                continue
            step = pack([len(row) for row in rows], counts)
            new = [[label := label + 1 for _ in range(n)] for n in counts]
            write(cache, step, [token for tokens in new for token in tokens])
            rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
        elif kind == "roll back":
            rows = [row[: max(0, len(row) - n)] for n, row in zip(numbers, rows, strict=True)]
        elif kind == "clear":
            cache.clear_row(first)
            rows[first] = []
        elif first == second:
            continue
        elif kind == "copy":
            cache.copy_row(first, second, len(rows[first]))
            rows[second] = list(rows[first])
        else:
            cache.release_row(second, first, len(rows[first]))
            rows[second], rows[first] = rows[first], []
        owned = sorted(block for blocks in cache.table.rows.values() for block in blocks)
        assert owned == list(range(len(owned))), "the blocks in use are the first ones, each with one owner"
        if cache.keys:
            for number, row in enumerate(rows):
                assert held(cache, number)[: len(row)] == row
