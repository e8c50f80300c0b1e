"""Keys and values lie in the row and slot of their token, and stay there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_states import KEY_SIZE, KV_HEADS, VALUE_SIZE, states_of
from torch import Tensor

from batchspec.layout.packed import PackedStep, pack
from batchspec.models import slot_cache
from batchspec.models.slot_cache import SlotCache


def write(cache: SlotCache, step: PackedStep, labels: list[float], layer: int = 0) -> tuple[Tensor, Tensor]:
    cache.begin(step)
    return cache.update(*states_of(labels), layer)


def test_each_token_goes_to_the_next_slot_of_its_row():
    cache = SlotCache(num_rows=3, max_slots=8)
    write(cache, pack([0, 0, 0], [2, 1, 3]), [10, 11, 20, 30, 31, 32])
    keys, values = write(cache, pack([2, 1, 3], [1, 2, 0]), [12, 21, 22])
    assert keys.shape == (3, KV_HEADS, 3, KEY_SIZE)
    assert values.shape == (3, KV_HEADS, 3, VALUE_SIZE)
    assert keys[:, 0, :, 0].tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert torch.equal(keys[..., :1].expand_as(keys), keys), "all channels are the token's"
    assert torch.equal(values[..., 0], -keys[..., 0])


def test_a_step_over_later_rows_leaves_the_earlier_ones_alone():
    cache = SlotCache(num_rows=3, max_slots=8)
    write(cache, pack([0], [2]), [10, 11])
    keys, _ = write(cache, pack([0], [1], rows=[2]), [30])
    assert keys.shape[0] == 1
    assert cache.keys[0][:, 0, :2, 0].tolist() == [[10, 11], [0, 0], [30, 0]]


def test_rolled_back_slots_are_overwritten_by_the_next_tokens():
    cache = SlotCache(num_rows=1, max_slots=8)
    write(cache, pack([0], [4]), [1, 2, 3, 4])
    keys, _ = write(cache, pack([2], [1]), [9])
    assert keys[0, 0, :, 0].tolist() == [1, 2, 9]


def test_layers_are_kept_apart():
    cache = SlotCache(num_rows=1, max_slots=8)
    step = pack([0], [1])
    first, _ = write(cache, step, [1], layer=0)
    second, _ = write(cache, step, [2], layer=5)
    assert (first[0, 0, 0, 0], second[0, 0, 0, 0]) == (1, 2)


def test_what_attention_reads_is_no_copy():
    cache = SlotCache(num_rows=2, max_slots=8)
    keys, values = write(cache, pack([0, 0], [1, 2]), [1, 2, 3])
    assert keys.untyped_storage().data_ptr() == cache.keys[0].untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == cache.values[0].untyped_storage().data_ptr()


def test_growth_keeps_the_content_and_ends_at_the_most_slots(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slot_cache, "GROWTH", 4)
    cache = SlotCache(num_rows=2, max_slots=10)
    write(cache, pack([0, 0], [3, 1]), [1, 2, 3, 5])
    assert cache.keys[0].shape[2] == 4
    keys, values = write(cache, pack([3, 1], [2, 1]), [4, 7, 6])
    assert cache.keys[0].shape[2] == cache.values[0].shape[2] == 8
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 4, 7], [5, 6, 0, 0, 0]]
    assert torch.equal(values[..., 0], -keys[..., 0])
    write(cache, pack([5], [5]), [1] * 5)
    assert cache.keys[0].shape[2] == 10


def test_unused_slots_hold_zeros_never_what_memory_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slot_cache, "GROWTH", 4)
    for _ in range(3):
        torch.full((64, 64), torch.nan)  # freed memory that a careless allocation would hand out again
        cache = SlotCache(num_rows=4, max_slots=64)
        write(cache, pack([0], [1]), [1])
        write(cache, pack([1], [30]), [1] * 30)
        assert all(torch.isfinite(store[0]).all() for store in (cache.keys, cache.values))
        assert not cache.keys[0][1:].any()


def test_copying_a_row_copies_the_tokens_of_all_layers():
    cache = SlotCache(num_rows=3, max_slots=8)
    step = pack([0, 0, 0], [1, 1, 3])
    for layer in (0, 1):
        write(cache, step, [10, 20, 30, 31, 32], layer)
    cache.copy_row(2, 0, length=3)
    for layer in (0, 1):
        assert cache.keys[layer][:, 0, :3, 0].tolist() == [[30, 31, 32], [20, 0, 0], [30, 31, 32]]
        assert cache.values[layer][0, 0, :3, 0].tolist() == [-30, -31, -32]


MOST_SLOTS = 20


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, list[int]]]]:
    """A number of rows, and what happens to them: rows add tokens, are rolled back, or are moved."""
    rows = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 5), min_size=rows, max_size=rows)
    pair = st.lists(st.integers(0, rows - 1), min_size=2, max_size=2)
    event = st.one_of(
        st.tuples(st.just("add"), counts),
        st.tuples(st.just("roll back"), counts),
        st.tuples(st.just("move"), pair),
    )
    return rows, draw(st.lists(event, max_size=12))


@given(histories())
@settings(max_examples=60, deadline=None)
def test_rows_hold_what_was_committed_whatever_happened(history: tuple[int, list[tuple[str, list[int]]]]):
    num_rows, events = history
    cache = SlotCache(num_rows, MOST_SLOTS)
    rows: list[list[float]] = [[] for _ in range(num_rows)]  # the model: plain lists
    label = 0.0
    for kind, numbers in events:
        if kind == "add":
            counts = [min(n, MOST_SLOTS - len(row)) for n, row in zip(numbers, rows, strict=True)]
            if not any(counts):
                continue
            step = pack([len(row) for row in rows], counts)
            new = [[label := label + 1 for _ in range(n)] for n in counts]
            keys, values = write(cache, step, [token for tokens in new for token in tokens])
            rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
            for number, row in enumerate(rows):
                assert keys[number, 1, : len(row), 2].tolist() == row
                assert values[number, 1, : len(row), 2].tolist() == [-token for token in row]
        elif kind == "roll back":
            rows = [row[: max(0, len(row) - n)] for n, row in zip(numbers, rows, strict=True)]
        else:
            source, to = numbers
            if source == to:
                continue
            cache.copy_row(source, to, len(rows[source]))
            rows[to] = list(rows[source])
