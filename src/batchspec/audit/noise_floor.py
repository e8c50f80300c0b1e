"""How far rounding alone moves logits here: the null band, and the floor under which a margin says nothing.

Rounding makes the target choose another token only where two logits are almost equal. How equal is measured, not
assumed. The references are fed to the target again, all tokens at once (teacher forcing), in three ways: alone in
float32, alone in the audit's dtype, and in a left-padded batch in the audit's dtype, which is batching without
speculation. At each position the gap between the two largest logits is compared with the float32 one:

    noise = the largest of  q(|gap alone - gap float32|),  q(|gap batched - gap float32|),  max(shortfall)
    floor = 2 * noise

where q is the 99.9 % quantile (with fewer than 1,000 positions the maximum), and the last term is how far the
references themselves, decoded token by token, are from the float32 argmax. If two computations A and B of the same
gap g choose differently, g lies between their errors: |g| <= max(|error A|, |error B|). That is why the errors of
gaps, and not of single logits, are what counts. The factor of 2 is for engines whose kernels round somewhat more.

In float32 and float64 all ways may agree, so the floor is never below 8 rounding units of the largest logit there.
A padded batch can also be *wrong* for a model. One that is more than 8 times as noisy as the target alone (in
float32 and float64: than 64 rounding units) is left out of the estimate, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchspec.audit.target import Target
from batchspec.models.reference import Forced

FACTOR = 2.0
QUANTILE = 0.999
LEAST_UNITS = 8.0
GUARD = 8.0
MOST_UNITS = 64.0


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The floor, and what it was made from."""

    floor: float
    dtype: str
    num_positions: int
    batch_size: int
    alone: float
    """q of the gap's error alone; 0 in float32 and float64, which are their own measure."""
    batched: float
    """The same in a padded batch; infinite if more gaps are no numbers than the quantile leaves out."""
    shortfall: float
    """The furthest that a reference token is below the float32 argmax."""
    unit: float
    """Rounding unit of the dtype times the largest logit."""
    is_batch_used: bool
    margins: list[list[float]] = field(repr=False)
    """Top-2 margin in float32 at every position of each reference."""

    @property
    def remarks(self) -> list[str]:
        if self.is_batch_used:
            return []
        return [
            f"transformers' padded batch moves gaps by up to {self.batched:.3g}, more than rounding explains. "
            "It is left out of the noise floor; a candidate that pads may be wrong for this model."
        ]


@dataclass(slots=True)
class _Gathered:
    alone: list[float] = field(default_factory=list)
    batched: list[float] = field(default_factory=list)
    shortfall: list[float] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)
    largest: float = 0.0


def measure_noise(
    target: Target, own: Forced, exact: Forced, batch_size: int, done: Callable[[], None]
) -> NoiseFloor:
    """Teacher-force all references, in batches of `batch_size`: by the target as it is (`own`), and in float32 or
    wider (`exact`, the same function if it is).

    Raises:
        ValueError: the target alone gives logits that are no numbers, against which nothing can be judged.
    """
    gathered = _Gathered()
    rows = list(zip(target.prompts, target.references, strict=True))
    size = max(2, batch_size)
    for start in range(0, len(rows), size):
        # A last batch that is not full is filled up with other prompts, so that all are batches.
        batch = [rows[(start + place) % len(rows)] for place in range(size)]
        together = own(batch)
        for row, batched in zip(rows[start : start + size], together, strict=False):
            precise = exact([row])[0]
            alone = precise if exact is own else own([row])[0]
            _check_numbers(precise, str(precise.dtype).removeprefix("torch."))
            _check_numbers(alone, target.dtype)
            _gather(gathered, precise, alone, batched, row[1])
            done()
    return _estimate(gathered, target.dtype, target.llm.model.dtype, size)


def _check_numbers(logits: Tensor, dtype: str) -> None:  # [tokens, vocabulary]
    """Minus infinity is a number here: some models bar tokens by it. But two tokens need to be possible."""
    if bool(logits.isnan().any()) or not bool(logits.topk(2, dim=-1).values.isfinite().all()):
        raise ValueError(f"the target's own logits in {dtype} are no numbers; audit in another dtype")


def _gather(gathered: _Gathered, exact: Tensor, alone: Tensor, batched: Tensor, tokens: list[int]) -> None:
    """Add one reference; the logits are `[tokens, vocabulary]`."""
    top = exact.topk(2, dim=-1)
    gap = top.values[:, 0] - top.values[:, 1]
    for logits, errors in ((alone, gathered.alone), (batched, gathered.batched)):
        values = logits.gather(-1, top.indices)
        moved = (values[:, 0] - values[:, 1] - gap).abs()
        moved[moved.isnan()] = math.inf  # some models give NaN in rows with padding
        errors.extend(moved.tolist())
    chosen = exact.gather(-1, torch.tensor(tokens, device=exact.device).unsqueeze(-1)).squeeze(-1)
    gathered.shortfall.extend((top.values[:, 0] - chosen).tolist())
    gathered.margins.append(gap.tolist())
    gathered.largest = max(gathered.largest, float(top.values.abs().max()))


def _estimate(gathered: _Gathered, name: str, dtype: torch.dtype, batch_size: int) -> NoiseFloor:
    alone, batched = quantile(gathered.alone), quantile(gathered.batched)
    shortfall = max(gathered.shortfall, default=0.0)
    unit = torch.finfo(dtype).eps * gathered.largest
    is_half = dtype in (torch.bfloat16, torch.float16)
    is_batch_used = batched <= (GUARD * max(alone, shortfall) if is_half else MOST_UNITS * unit)
    noise = max(alone, shortfall, batched if is_batch_used else 0.0)
    least = 0.0 if is_half else LEAST_UNITS * unit
    return NoiseFloor(
        floor=max(FACTOR * noise, least),
        dtype=name,
        num_positions=len(gathered.alone),
        batch_size=batch_size,
        alone=alone,
        batched=batched,
        shortfall=shortfall,
        unit=unit,
        is_batch_used=is_batch_used,
        margins=gathered.margins,
    )


def quantile(values: list[float]) -> float:
    """The `QUANTILE` of some values, the next larger one if it lies between two; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]
