"""Synthetic acceptance: drafts cost nothing and are accepted by a coin, so that what is timed is the target alone.

It lets models be timed whose weights are not to be had, as random weights draft and accept nothing of sense. What
it says holds for a drafter that is free and right so often; of a real drafter it says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from batchspec.decoding.judge import Gain, Judge
from batchspec.drafting.budget import Budget, FixedBudget
from batchspec.drafting.drafter import Draft
from batchspec.engine import Engine
from batchspec.request import Sequence

NUM_COINS = 65_537
STRIDE = 7_919
"""Coins between two requests: a prime, as is their number, so that requests have coins of their own."""


class RandomDrafter:
    """Drafts random tokens, as many as it may."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        self.tokens = range(vocab_size)
        self.device = device
        self.budget: Budget = FixedBudget()
        self._random = random.Random(seed)

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        drafts = [self._random.choices(self.tokens, k=limit) for limit in limits]
        return Draft.from_lists(drafts, self.device)

    def release_row(self, row: int, last: int) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True, slots=True)
class CoinJudge(Judge):
    """Judges as always, which takes its time, and then lets coins say how much of a draft is accepted.

    A coin belongs to a request and a position, whatever its token is and whatever else is in the batch.
    """

    coins: tuple[bool, ...] = ()

    def __call__(self, logits: Tensor, rows: list[Sequence], draft: Draft) -> list[Gain]:
        gains = Judge.__call__(self, logits, rows, draft)
        drafted = draft.token_ids.tolist()
        return [
            Gain([*tokens[: self.num_accepted(row, count)], gain.token_ids[-1]], [])
            for row, tokens, count, gain in zip(rows, drafted, draft.num_tokens, gains, strict=True)
        ]

    def num_accepted(self, row: Sequence, num_draft_tokens: int) -> int:
        """Draft tokens before the first whose coin falls the wrong way."""
        start = row.seed * STRIDE + len(row.token_ids)
        heads = (self.coins[(start + place) % len(self.coins)] for place in range(num_draft_tokens))
        return len(list(takewhile(bool, heads)))


def toss(acceptance: float, seed: int = 0) -> tuple[bool, ...]:
    """Coins that say yes with probability `acceptance`, the same for a seed."""
    draw = random.Random(seed)
    return tuple(draw.random() < acceptance for _ in range(NUM_COINS))


def accept_by_coin(engine: Engine, acceptance: float) -> None:
    """Let an engine that speculates draft random tokens and accept each with probability `acceptance`."""
    if engine.config.num_speculative_tokens:
        engine.drafter = RandomDrafter(engine.intake.vocab_size, engine.runner.device)
        engine.judge = CoinJudge(engine.judge.sampling_method, engine.judge.logprobs_mode, toss(acceptance))
