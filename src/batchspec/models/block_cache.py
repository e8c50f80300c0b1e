"""A key/value cache in blocks: slot `j` of a row is in block `j // BLOCK` of those that the row owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from batchspec.layout.block_step import AttentionLayout, lay_out_attention
from batchspec.layout.blocks import BlockTable, homes
from batchspec.layout.packed import PackedStep
from batchspec.models.slot_cache import check_states, check_step


class BlockCache(Cache):
    """Keys and values of all layers, each a pool `[blocks, kv heads, BLOCK, head size]` that grows when needed.

    It holds no lengths: which slots of a row count is said by the step's layout. So rolling a row back costs
    nothing, and stale slots are overwritten by the next tokens. A block is zeroed when a row gets it, since a
    masked slot still meets a weight of exactly 0.0, and 0.0 times what memory or another request left there could
    be NaN. What is not guarded against are keys or values of a *rejected draft token* that overflow to infinity:
    they spoil their own row until they are overwritten.
    """

    def __init__(self, num_rows: int, max_slots: int) -> None:
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_slots = max_slots
        self.table = BlockTable()
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._homes: tuple[Tensor, Tensor] | None = None
        """Where the tokens of the step go, `[N]` each: blocks, and places in there; ..."""
        self._vectors: dict[int, Tensor] = {}
        """... and by the number of kv heads, `[N * kv heads]`: places among a pool's vectors."""

    def begin(self, step: PackedStep) -> AttentionLayout:
        """Make `step` the layout of the coming forward pass; see that its slots exist.

        Raises:
            ValueError: the step needs a row or a slot that this cache never has.
        """
        check_step(step, self.num_rows, self.max_slots)
        self._reserve(step.rows, [held + new for held, new in zip(step.lengths, step.num_new, strict=True)])
        self._homes, self._vectors = homes(step, self.table), {}
        return lay_out_attention(step, self.table)

    def update(
        self,
        key_states: Tensor,  # [1, kv heads, N, head size]
        value_states: Tensor,  # [1, kv heads, N, value head size]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # [blocks, kv heads, BLOCK, head size] twice
        """Write the step's tokens to their slots; give back the pools."""
        if layer_idx not in self.keys:
            keys, values = self._allocate(key_states), self._allocate(value_states)
            self.values[layer_idx] = values  # keys last: they say that both are there
            self.keys[layer_idx] = keys
        self._write(self.keys[layer_idx], key_states)
        self._write(self.values[layer_idx], value_states)
        return self.keys[layer_idx], self.values[layer_idx]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Let row `target` hold the first `length` slots of another row, and nothing else."""
        self.clear_row(target)
        self._reserve([target], [length])
        targets = self.table.rows.get(target, [])
        sources = self.table.rows.get(source, [])[: len(targets)]
        used = length - (len(targets) - 1) * self.table.block_size  # slots of the last block
        for pool in self._pools():
            pool[targets] = pool[sources]
            if targets:
                pool[targets[-1], :, used:] = 0

    def clear_row(self, row: int) -> None:
        """Forget all of a row. Safe to be cut off: the table changes when all is copied."""
        moves = self.table.moves_without(row)
        if moves:
            sources, targets = list(moves), list(moves.values())
            for pool in self._pools():
                pool[targets] = pool[sources]
        self.table.drop(row, moves)

    def release_row(self, row: int, last: int, last_length: int) -> None:
        """Let the last row take the place of `row`: it keeps its blocks under another number."""
        self.clear_row(row)
        if row != last:
            self.table.rename(last, row)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows have lengths of their own, and positions are always handed to the model."""
        return 0

    def _reserve(self, rows: Sequence[int], num_slots: list[int]) -> None:
        """Safe to be cut off, too: rows are given their blocks when those are there and are zeroed."""
        missing = self.table.missing(rows, num_slots)
        if not missing:
            return
        first = self.table.num_blocks
        end = first + sum(map(len, missing.values()))
        for store in (self.keys, self.values):
            for layer, pool in store.items():
                if len(pool) < end:
                    pool = store[layer] = _grown(pool, self._capacity(end))
                pool[first:end] = 0
        self.table.give(missing)

    def _pools(self) -> Iterator[Tensor]:
        yield from self.keys.values()
        yield from self.values.values()

    def _write(self, pool: Tensor, states: Tensor) -> None:
        check_states(states, pool)
        _, num_heads, _, size = pool.shape
        vectors = self._places(num_heads)
        line = states[0].transpose(0, 1)[: len(vectors) // num_heads]  # what stands behind is padding
        pool.view(-1, size).index_copy_(0, vectors, line.reshape(-1, size))

    def _places(self, num_heads: int) -> Tensor:  # [N * kv heads] int64
        if self._homes is None:
            raise RuntimeError("BlockCache.begin must be called before the forward pass")
        if num_heads not in self._vectors:
            blocks, places = self._homes
            heads = torch.arange(num_heads, device=blocks.device)
            rows = blocks.unsqueeze(1) * num_heads + heads
            self._vectors[num_heads] = (rows * self.table.block_size + places.unsqueeze(1)).flatten()
        return self._vectors[num_heads]

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, head_size = states.shape
        return states.new_zeros(self._capacity(self.table.num_blocks), heads, self.table.block_size, head_size)

    def _capacity(self, needed: int) -> int:
        """A quarter more, but not more than there can ever be."""
        most = self.num_rows * -(-self.max_slots // self.table.block_size)
        return max(needed, min(needed + needed // 4 + 2, most))


def _grown(pool: Tensor, num_blocks: int) -> Tensor:
    new = pool.new_zeros(num_blocks, *pool.shape[1:])
    new[: len(pool)] = pool
    return new
