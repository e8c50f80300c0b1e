"""A measurement: methods take turns within each repeat, at one batch size after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Set

import torch

from batchspec.bench.engines import Engine
from batchspec.bench.memory import peak, start_peak
from batchspec.bench.run import Run, make_run
from batchspec.bench.workload import Workload

WARM_UP_TOKENS = 8

RunKey = tuple[str, int, int]
"""Method, batch size, repeat."""

Open = Callable[[str, int], Engine]
"""Takes the name of a method and a batch size."""


def key_of(run: Run) -> RunKey:
    return run.method, run.batch_size, run.repeat


def measure(
    names: Iterable[str],
    batch_sizes: Iterable[int],
    repeats: int,
    workload: Workload,
    done: Set[RunKey],
    open_method: Open,
    device: torch.device,
) -> Iterator[Run | None]:
    """Make the runs that are not done yet; None for each one that is."""
    names = list(names)
    for size in batch_sizes:
        keys = [(name, size, repeat) for repeat in range(repeats) for name in names]
        missing = [name for name in names if any(key not in done for key in keys if key[0] == name)]
        engines = {name: open_method(name, size) for name in missing}
        for engine in engines.values():
            engine(workload.start(size, WARM_UP_TOKENS))
        for name, size, repeat in keys:
            if (name, size, repeat) in done:
                yield None
            else:
                yield _run(engines[name], name, size, repeat, workload, device)


def _run(engine: Engine, name: str, batch_size: int, repeat: int, workload: Workload, device: torch.device) -> Run:
    gc.collect()
    start_peak(device)
    start = time.perf_counter()
    outcome = engine(workload)
    seconds = time.perf_counter() - start
    return make_run(name, batch_size, repeat, seconds, peak(device), *outcome)
