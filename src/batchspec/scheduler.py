"""Who runs and who waits. No tensors: a row is a place in a list."""

from __future__ import annotations

from collections import deque

from batchspec.request import Sequence


class Scheduler:
    """First come, first served. Rows are dense: sequence `running[i]` owns row `i`, and there are no holes."""

    def __init__(self, num_rows: int, refill: bool = True) -> None:
        self.num_rows = num_rows
        self.refill = refill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def admit(self) -> None:
        """Let waiting sequences have the free rows, in their order; without `refill` only if all are free."""
        if self.running and not self.refill:
            return
        while self.waiting and len(self.running) < self.num_rows:
            if self.waiting[0] not in self.running:  # else cut off here before
                self.running.append(self.waiting[0])
            self.waiting.popleft()

    def release(self, row: int) -> int:
        """Take the sequence out of `row` and let the last row's sequence move there; returns the last row.

        >>> scheduler = Scheduler(num_rows=3)
        >>> scheduler.running = ["a", "b", "c"]
        >>> scheduler.release(0), scheduler.running
        (2, ['c', 'b'])
        """
        last = len(self.running) - 1
        moved = self.running.pop()
        if row != last:
            self.running[row] = moved
        return last

    def has_waiting_sibling(self, sequence: Sequence) -> bool:
        """Is another candidate of the request next in the queue, and may rows be taken again?"""
        return self.refill and bool(self.waiting) and self.waiting[0].siblings is sequence.siblings

    def hand_over(self, row: int) -> Sequence:
        """Let the next waiting sequence have a row as it is; returns that sequence."""
        self.running[row] = self.waiting[0]
        self.waiting.popleft()
        return self.running[row]

    def find(self, request_id: str) -> Sequence | None:
        """The running or waiting sequence of that request; one that has ended is neither."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request_id == request_id and not sequence.is_finished:
                return sequence
        return None
