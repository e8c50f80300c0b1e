"""The most memory that a run took."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET = "5"
"""Written there, it makes Linux forget the high-water mark."""


def start_peak(device: torch.device) -> None:
    """Measure the peak from now on. Where the system has no such thing, `peak` gives None."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(CLEAR, os.W_OK):
        CLEAR.write_text(RESET)


def peak(device: torch.device) -> int | None:
    """Bytes since `start_peak`: on a GPU those of tensors, else those of the whole process (resident)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if not os.access(CLEAR, os.W_OK):
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else None
