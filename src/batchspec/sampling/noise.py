"""Noise that is a function of its place: of request seed, candidate index, position and token, and nothing else.

No generator is advanced, so it makes no difference who else is in the batch, how many tokens a round brings, or
who asks how often. The function is SplitMix64 (Steele, Lea, Flood 2014): outputs of a counter, mixed. Its integer
arithmetic gives the same bits on every device; the two logarithms behind it may differ in the last one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device

TOKEN, DRAFT, ACCEPT = range(3)
"""Streams that have to be independent: the choice of a token, a drafter's own choice, whether to accept it."""

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

FEW = 8
"""Noise is computed for single tokens if fewer than one in so many are possible."""

BLOCK = 1 << 17
"""Tokens whose noise is computed at once: as many as the processor's cache holds."""


def request_seed(engine_seed: int, serial: int) -> int:
    """The seed of a request that names none: another one for each serial number.

    >>> request_seed(0, 1) == request_seed(0, 1) != request_seed(0, 2) != request_seed(1, 1)
    True
    """
    return _chain(engine_seed, serial, ord("s"))


def keys(places: Iterable[tuple[int, int, int]], stream: int, device: torch.device | str = "cpu") -> Tensor:
    """`[M]` int64: a key for each (seed, candidate index, position)."""
    return to_device([_signed(_chain(*place, stream)) for place in places], device)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:  # int64, of one shape; float32
    """Standard Gumbel noise: the token with the largest sum of log-probability and noise is a draw from the
    distribution. The same token of the same key has the same noise, whatever other tokens are asked for."""
    # The winner has the largest noise, which is where a logarithm of small numbers has all its digits.
    return _uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def gumbel_table(keys: Tensor, vocab_size: int) -> Tensor:  # [M] int64; [M, vocabulary] float32
    """The noise of all tokens for each key."""
    table = torch.empty(keys.shape[0], vocab_size, dtype=torch.float32, device=keys.device)
    token_ids = torch.arange(vocab_size, device=keys.device)
    size = max(1, BLOCK // vocab_size)
    for start in range(0, keys.shape[0], size):
        table[start : start + size] = gumbel(keys[start : start + size].unsqueeze(1), token_ids)
    return table


def draw(scores: Tensor, keys: Tensor) -> Tensor:  # [M, vocabulary], changed in place; [M] int64; [M] int64
    """A token for each line, from logits or log-probabilities: the largest, noise added.

    Where few tokens are possible at all, only theirs is computed.
    """
    is_possible = scores > -torch.inf
    if int(is_possible.count_nonzero()) * FEW < scores.numel():
        lines, tokens = is_possible.nonzero(as_tuple=True)
        scores[lines, tokens] += gumbel(keys[lines], tokens)
    else:
        scores += gumbel_table(keys, scores.shape[1])
    return scores.argmax(dim=-1)


def uniform(keys: Tensor) -> Tensor:  # [M] int64 to [M] float32
    """Uniform noise, above 0 and below 1."""
    return _uniform(keys, keys.new_zeros(1))


def _uniform(keys: Tensor, counters: Tensor) -> Tensor:
    bits = counters * _signed(GAMMA) + keys
    bits ^= _shifted(bits, 30)
    bits *= _signed(FIRST)
    bits ^= _shifted(bits, 27)
    bits *= _signed(SECOND)
    bits ^= _shifted(bits, 31)
    # 63 bits, rounded to the 24 of a float32 from the highest one set on: fine where it is small, and never 1.
    return _shifted(bits, 1).float().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift to the right without the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


def _chain(*values: int) -> int:
    """One number of 64 bits from several, each mixed in behind the last."""
    key = 0
    for value in values:
        key = _mix((key + value + GAMMA) & MASK)
    return key


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * FIRST & MASK
    bits = (bits ^ (bits >> 27)) * SECOND & MASK
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
