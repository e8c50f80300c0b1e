"""The caches of the padded strategies: a batch that is realigned (EQSPEC), and a pool of rows (EXSPEC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from batchspec.layout.packed import PackedStep
from batchspec.layout.padded import gather_columns, left_padding, realignment, source_columns
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


class RealignedBatch:
    """EQSPEC's batch: one left-padded `DynamicCache`, moved to a new padding when its rows gain unequally.

    A row is a place in the batch, or was computed alone and joins the batch at the next `align`.
    """

    def __init__(self, timer: StageTimer) -> None:
        self.timer = timer
        self.cache: DynamicCache = TimedDynamicCache(timer)
        self.padding: list[int] = []
        """`[places]`: columns of padding before each row of the tensors."""
        self.rows: dict[int, int | DynamicCache] = {}
        """Where each row is: its place in the tensors, or a cache of its own."""
        self.num_realignments = 0

    def align(self, lengths: Sequence[int]) -> DynamicCache:
        """Make the batch hold the first `lengths[i]` tokens of row `i` and nothing else: unpad and repad.

        Only if a row came, went or has to move is anything copied (one gather per layer); else the columns
        behind the longest row, those of rejected drafts, are cut off.
        """
        places = [self.rows.get(row) for row in range(len(lengths))]
        width = self.cache.get_seq_length()
        if places == list(range(len(self.padding))) and not any(realignment(self.padding, lengths)):
            self.cache.crop(max(lengths) - width)
        else:
            self.num_realignments += 1
            self.cache = self._realigned(places, lengths)
            self.rows = {row: row for row in range(len(lengths))}
        self.padding = left_padding(lengths)
        return self.cache

    def take_row(self, row: int, length: int) -> DynamicCache:
        """The first `length` tokens of a row, as a batch of one."""
        return self._realigned([self.rows.get(row)], [length])

    def put_row(self, row: int, cache: DynamicCache) -> None:
        """Let a row be what a batch of one holds."""
        self.rows[row] = cache

    def release_row(self, row: int, last: int) -> None:
        """Forget a row and let the last one have its number. Tensors follow with the next `align`."""
        self.rows.pop(row, None)
        if last in self.rows:
            self.rows[row] = self.rows.pop(last)

    def _realigned(self, places: Sequence[int | DynamicCache | None], lengths: Sequence[int]) -> DynamicCache:
        """A new batch: row `i` is `places[i]`, cut to `lengths[i]` tokens; a row that is nowhere holds none."""
        new = TimedDynamicCache(self.timer)
        if max(lengths) == 0:
            return new
        joined = [row for row, place in enumerate(places) if isinstance(place, int) and lengths[row]]
        alone = {row: place for row, place in enumerate(places) if isinstance(place, DynamicCache)}
        some = self.cache if joined else next(iter(alone.values()))
        device = some.layers[0].keys.device
        sources = to_device([places[row] for row in joined], device)  # type: ignore[arg-type]
        starts = [self.padding[places[row]] for row in joined]  # type: ignore[index]
        columns = source_columns(starts, [lengths[row] for row in joined], 0, device) if joined else None
        padding = left_padding(lengths)
        for index, layer in enumerate(some.layers):
            moved = DynamicLayer()
            new.layers.append(moved)
            if not layer.is_initialized:  # the layer uses another layer's keys and values
                continue
            moved.lazy_initialization(layer.keys, layer.values)
            for name in ("keys", "values"):
                old = getattr(layer, name)
                if columns is not None and len(joined) == len(places):
                    setattr(moved, name, gather_columns(old, sources, columns))
                    continue
                tensor = old.new_zeros(len(places), old.shape[1], max(lengths), old.shape[3])
                if columns is not None:
                    gathered = gather_columns(old, sources, columns)
                    tensor[to_device(joined, device), :, max(lengths) - gathered.shape[2] :] = gathered
                for row, single in alone.items():
                    content = getattr(single.layers[index], name)[0, :, : lengths[row]]
                    tensor[row, :, padding[row] :] = content
                setattr(moved, name, tensor)
        return new


class PoolCache(SlotCache):
    """EXSPEC's pool: rows are left-packed slots as in `SlotCache`, and a step may take any of them.

    What the layers attend to is put together as each writes its tokens, in the copy for which transformers'
    cache concatenates old and new: rows of equal length as they are, others shifted to end at one column. So a
    row's keys and values are computed once, kept once, and never moved within the pool.
    """

    def __init__(self, num_rows: int, max_slots: int, timer: StageTimer) -> None:
        super().__init__(num_rows, max_slots)
        self.timer = timer
        self._columns: Tensor | None = None

    def begin(self, step: PackedStep) -> None:
        super().begin(step)
        is_level = len(set(step.lengths)) == 1
        starts = [0] * step.num_rows
        device = step.slots.device
        self._columns = None if is_level else source_columns(starts, step.lengths, step.num_columns, device)
        self._rows = to_device(list(step.rows), device)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with self.timer.stage("append"):
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
        if self._columns is None:
            return step.select_rows(store[:, :, : self._slots_to_read(step)])
        return gather_columns(store, self._rows, self._columns)

    def _slots_to_read(self, step: PackedStep) -> int:
        return max(step.lengths) + step.num_columns
