"""A key/value cache that scatters: token `j` of a sequence lives in slot `j` of its row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from batchspec.layout.packed import PackedStep

GROWTH = 128
"""Slots by which the cache grows at least. Small, as attention is faster over a cache it reads to the end."""


class SlotCache(Cache):
    """Keys and values of all layers, `[rows, kv heads, slots, head size]` each, grown when a step needs more.

    It holds no lengths: which slots of a row count is said by the step's layout. So rolling a row back costs
    nothing, and stale slots are overwritten by the next tokens. Unused rows and slots hold zeros, since a masked
    slot still meets a weight of exactly 0.0, and 0.0 times what memory or another request left there could be
    NaN. What is not guarded against are keys or values of a *rejected draft token* that overflow to infinity:
    they spoil their own row until they are overwritten.
    """

    def __init__(self, num_rows: int, max_slots: int) -> None:
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_slots = max_slots
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.step: PackedStep | None = None

    def begin(self, step: PackedStep) -> None:
        """Make `step`, whose rows are neighbours, the layout of the coming forward pass; see that its slots exist.

        Raises:
            ValueError: the step needs a row or a slot that this cache never has.
        """
        check_step(step, self.num_rows, self.max_slots)
        self.step = step
        for store in (self.keys, self.values):
            for layer, old in store.items():
                if old.shape[0] < step.end_row or old.shape[2] < self._slots_to_read(step):
                    store[layer] = self._grown(old, step.end_row, self._slot_capacity(step))

    def update(
        self,
        key_states: Tensor,  # [1, kv heads, N, head size]
        value_states: Tensor,  # [1, kv heads, N, value head size]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # [rows of the step, kv heads, slots, head size] twice
        """Write the step's tokens to their slots; give back the rows that the step attends to."""
        if self.step is None:
            raise RuntimeError("SlotCache.begin must be called before the forward pass")
        if layer_idx not in self.keys:
            keys, values = self._allocate(key_states, self.step), self._allocate(value_states, self.step)
            self.values[layer_idx] = values  # keys last: they say that both are there
            self.keys[layer_idx] = keys
        self._write(self.keys[layer_idx], key_states, self.step)
        self._write(self.values[layer_idx], value_states, self.step)
        return self._read(self.keys[layer_idx], self.step), self._read(self.values[layer_idx], self.step)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Let row `target` hold the first `length` slots of another row, and nothing else."""
        self.clear_row(target)
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                if source >= tensor.shape[0]:  # no step has needed it yet
                    continue
                if target >= tensor.shape[0]:
                    tensor = store[layer] = self._grown(tensor, target + 1, 0)
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Forget all of a row, so that nothing of its request can reach the next one."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                if row < tensor.shape[0]:  # else no step has needed it yet
                    tensor[row].zero_()

    def release_row(self, row: int, last: int, last_length: int) -> None:
        """Let the last row, of so many tokens, take the place of `row`, and clear where it was."""
        if row != last:
            self.copy_row(last, row, last_length)
        self.clear_row(last)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows have lengths of their own, and positions are always handed to the model."""
        return 0

    def _write(self, store: Tensor, states: Tensor, step: PackedStep) -> None:
        check_states(states, store)
        # What stands behind the step's tokens on the line is padding.
        store[step.cache_rows, :, step.slots] = self._line(states, step)[: step.num_tokens]

    def _line(self, states: Tensor, step: PackedStep) -> Tensor:  # [N, kv heads, head size]
        return states[0].transpose(0, 1)

    def _read(self, store: Tensor, step: PackedStep) -> Tensor:  # [rows of the step, kv heads, slots, head size]
        return store[step.rows[0] : step.end_row, :, : self._slots_to_read(step)]

    def _slots_to_read(self, step: PackedStep) -> int:
        return step.num_slots

    def _allocate(self, states: Tensor, step: PackedStep) -> Tensor:
        _, heads, _, head_size = states.shape
        return states.new_zeros(self._row_capacity(step.end_row), heads, self._slot_capacity(step), head_size)

    def _grown(self, old: Tensor, num_rows: int, num_slots: int) -> Tensor:
        rows, heads, slots, head_size = old.shape
        new = old.new_zeros(max(rows, self._row_capacity(num_rows)), heads, max(slots, num_slots), head_size)
        new[:rows, :, :slots] = old
        return new

    def _row_capacity(self, num_rows: int) -> int:
        return min(1 << (num_rows - 1).bit_length(), self.num_rows)  # doubled: a small batch takes a small cache

    def _slot_capacity(self, step: PackedStep) -> int:
        needed = self._slots_to_read(step)
        return max(needed, min(-(-needed // GROWTH) * GROWTH, self.max_slots))


def check_step(step: PackedStep, num_rows: int, max_slots: int) -> None:
    """Raises ValueError if the step needs a row or a slot that there never is."""
    if step.end_row > num_rows:
        raise ValueError(f"rows must be below {num_rows}, got {step.end_row - 1}")
    if step.num_slots > max_slots:
        raise ValueError(f"a row must have at most {max_slots} tokens, got {step.num_slots}")


def check_states(states: Tensor, store: Tensor) -> None:
    """Raises RuntimeError if what the model computes is of another kind than what the cache holds."""
    if states.dtype != store.dtype or states.device != store.device:
        raise RuntimeError(
            f"the cache holds {store.dtype} on {store.device} and the model now computes {states.dtype} on "
            f"{states.device}; make a new LLM after changing the model, and call it outside of autocast"
        )
