"""From the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device | str) -> Tensor:
    """Integers of the host as an int64 tensor on `device`, without waiting for the device.

    The host memory is pageable, so it is read before this returns; do not pin it.
    """
    on_host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.long, device="cpu")
    return on_host.to(device, non_blocking=True)
