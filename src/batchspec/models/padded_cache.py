"""The caches of the padded strategies: a batch that is realigned (EQSPEC), and a pool of rows (EXSPEC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from batchspec.layout.packed import PackedStep
from batchspec.layout.padded import Gather, left_padding, source_columns
from batchspec.layout.transfer import to_device
from batchspec.models.slot_cache import SlotCache
from batchspec.stats import StageTimer


class TimedDynamicCache(DynamicCache):
    """transformers' own cache, every layer at full length: a sliding layer forgets what a roll-back needs, and
    the mask applies the window anyway. `update` joins old and new, which is timed as a stage of its own."""

    def __init__(self, timer: StageTimer) -> None:
        super().__init__()
        self.timer = timer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        with self.timer.stage("append"):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a batch lies in its tensors, and which layers have still to be moved there."""

    rows: dict[int, int | DynamicCache]
    """Where each row is: its place in the tensors, or a cache of its own."""
    padding: list[int]
    """`[places]`: columns of padding before each row of the tensors."""
    move: Gather | None = None
    unmoved: list[DynamicLayer] = field(default_factory=list)


class RealignedBatch:
    """EQSPEC's batch: one left-padded `DynamicCache`, moved to a new padding when its rows gain unequally.

    A row is a place in the batch, or was computed alone and joins the batch at the next `align`.
    """

    def __init__(self, timer: StageTimer) -> None:
        self.timer = timer
        self.cache: DynamicCache = TimedDynamicCache(timer)
        self.placement = Placement({}, [])

    def align(self, lengths: Sequence[int]) -> DynamicCache:
        """Make the batch hold the first `lengths[i]` tokens of row `i` and nothing else: unpad and repad.

        Only if a row came, went or has to move is anything copied (one gather per tensor); else the columns
        behind the longest row, those of rejected drafts, are cut off.
        """
        self._finish_moving()
        places = [self.placement.rows.get(row) for row in range(len(lengths))]
        padding = left_padding(lengths)
        if places == list(range(len(self.placement.padding))) and padding == self.placement.padding:
            for layer in self.cache.layers:  # each by itself: a forward pass may have failed between two
                layer.crop(min(0, max(lengths) - layer.get_seq_length()))
            return self.cache
        rows: dict[int, int | DynamicCache] = {row: row for row in range(len(lengths))}
        in_batch = [place for place in places if isinstance(place, int)]
        if len(in_batch) < len(places):
            self.cache, self.placement = self._joined(places, lengths), Placement(rows, padding)
        else:  # set at once, so that a move that is cut off can be gone on with
            layers = [layer for layer in self.cache.layers if layer.is_initialized]
            self.placement = Placement(rows, padding, self._gather(in_batch, lengths), layers)
            self._finish_moving()
        return self.cache

    def take_row(self, row: int, length: int) -> DynamicCache:
        """The first `length` tokens of a row, as a batch of one."""
        self._finish_moving()
        return self._joined([self.placement.rows.get(row)], [length])

    def put_row(self, row: int, cache: DynamicCache) -> None:
        """Let a row be what a batch of one holds."""
        self.placement.rows[row] = cache

    def release_row(self, row: int, last: int) -> None:
        """Forget a row and let the last one have its number. Tensors follow with the next `align`."""
        rows = self.placement.rows
        rows.pop(row, None)
        if last in rows:
            rows[row] = rows.pop(last)

    def _finish_moving(self) -> None:
        """Move layer by layer, so that no more than one is there twice."""
        placement = self.placement
        while placement.unmoved and placement.move is not None:
            layer = placement.unmoved[-1]
            layer.keys, layer.values = placement.move(layer.keys), placement.move(layer.values)
            placement.unmoved.pop()

    def _joined(self, places: Sequence[int | DynamicCache | None], lengths: Sequence[int]) -> DynamicCache:
        """A new batch: row `i` is `places[i]`, cut to `lengths[i]` tokens; a row that is nowhere holds none."""
        new = TimedDynamicCache(self.timer)
        moving = {row: place for row, place in enumerate(places) if isinstance(place, int) and lengths[row]}
        alone = {row: place for row, place in enumerate(places) if isinstance(place, DynamicCache)}
        gather = self._gather(list(moving.values()), [lengths[row] for row in moving]) if moving else None
        sources = self.cache if gather else next(iter(alone.values()), new)
        for index, source in enumerate(sources.layers):
            layer = DynamicLayer()
            new.layers.append(layer)
            if not source.is_initialized:
                continue
            layer.lazy_initialization(source.keys, source.values)
            for name in ("keys", "values"):
                moved = gather(getattr(source, name)) if gather else getattr(source, name)[:0]
                singles = {row: getattr(cache.layers[index], name) for row, cache in alone.items()}
                setattr(layer, name, _side_by_side(moved, list(moving), singles, lengths))
        return new

    def _gather(self, places: list[int], lengths: Sequence[int]) -> Gather:
        """Where the tokens of some rows are. A row that holds none may lie anywhere."""
        device = self.cache.layers[0].keys.device if self.cache.layers else torch.device("cpu")
        starts = [self.placement.padding[place] if n else 0 for place, n in zip(places, lengths, strict=True)]
        return Gather(to_device(places, device), source_columns(starts, lengths, device=device))


def _side_by_side(
    moved: Tensor,  # [moved rows, heads, columns, size]
    rows: list[int],  # [moved rows]
    singles: dict[int, Tensor],  # [1, heads, columns, size] each
    lengths: Sequence[int],  # [rows]
) -> Tensor:  # [rows, heads, L, size]
    """Rows of the batch and rows that were computed alone, side by side, all ending in the last column."""
    width = max(lengths)
    _, heads, columns, size = moved.shape
    result = moved.new_zeros(len(lengths), heads, width, size)
    if rows:
        result[to_device(rows, moved.device), :, width - columns :] = moved
    for row, single in singles.items():
        result[row, :, width - lengths[row] :] = single[0, :, : lengths[row]]
    return result


class PoolCache(SlotCache):
    """EXSPEC's pool: rows are left-packed slots as in `SlotCache`, and a step may take any of them.

    What the layers attend to is put together as each writes its tokens, in the copy for which transformers'
    cache concatenates old and new: rows of equal length as they are, others shifted to end at one column. So a
    row's keys and values are computed once, kept once, and never moved within the pool.
    """

    def __init__(self, num_rows: int, max_slots: int, timer: StageTimer) -> None:
        super().__init__(num_rows, max_slots)
        self.timer = timer
        self._is_level = True
        """Are the step's rows of equal length?"""
        self._gather: Gather | None = None
        """How to read rows that are no neighbours, or not of equal length."""

    def begin(self, step: PackedStep) -> None:
        super().begin(step)
        self._is_level = len(set(step.lengths)) == 1
        self._gather = None
        if not (self._is_level and step.are_neighbours):
            device = step.slots.device
            columns = source_columns([0] * step.num_rows, step.lengths, step.num_columns, device)
            self._gather = Gather(to_device(step.rows, device), columns)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with self.timer.stage("append" if self._is_level else "realign"):
            return super().update(*args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the past, padding included, from which transformers builds its masks."""
        return max(self.step.lengths) if self.step is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def _line(self, states: Tensor, step: PackedStep) -> Tensor:  # states: [rows, kv heads, T, head size]
        line = states.transpose(1, 2).flatten(0, 1)
        return line if step.is_full else line.index_select(0, step.grid_index)

    def _read(self, store: Tensor, step: PackedStep) -> Tensor:  # [rows, kv heads, L + T, head size]
        return super()._read(store, step) if self._gather is None else self._gather(store)

    def _slots_to_read(self, step: PackedStep) -> int:
        return max(step.lengths) + step.num_columns
