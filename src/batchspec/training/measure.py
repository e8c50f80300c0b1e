"""How good the student is on texts that it was not trained on."""

from __future__ import annotations

from typing import Any

import torch

from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.models.capability import make_runner
from batchspec.models.short_head import head_ids
from batchspec.request import Sequence
from batchspec.sampling.method import draw_coupled
from batchspec.sampling_params import SamplingParams
from batchspec.stats import StageTimer
from batchspec.training.lines import Line
from batchspec.training.shards import Text
from batchspec.training.student import logits_of, vocabulary_places

DEPTH = 4
"""Draft tokens that are rolled out."""

STRIDE = 5
"""Tokens from one rollout of a text to the next."""

NUM_ROWS = 16


@torch.no_grad()
def agreement(student: Any, lines: list[Line]) -> float:
    """Share of the places at which the student's most probable token is the target's."""
    places = vocabulary_places(student, student.get_input_embeddings().num_embeddings, lines[0].token_ids.device)
    agreed = total = 0
    for line in lines:
        wanted = places[line.top_ids[:, 0]]
        agreed += int((logits_of(student, line).argmax(dim=-1) == wanted).sum())
        total += len(wanted)
    return agreed / max(total, 1)


@torch.no_grad()
def acceptance(student: Any, texts: list[Text], strategy: str) -> list[float]:
    """Share of drafts whose first 1, 2, ... DEPTH tokens are the target's: drafted along greedy answers, by the
    drafter that will draft in an engine. All 0.0 if no answer is long enough."""
    texts = [text for text in texts if text.is_greedy and text.num_answer_tokens > DEPTH]
    matched, total = [0] * DEPTH, 0
    for start in range(0, len(texts), NUM_ROWS):
        for drafted, wanted in _rollouts(student, texts[start : start + NUM_ROWS], strategy):
            total += 1
            for depth in range(DEPTH):
                matched[depth] += drafted[: depth + 1] == wanted[: depth + 1]
    return [count / max(total, 1) for count in matched]


def _rollouts(student: Any, texts: list[Text], strategy: str) -> list[tuple[list[int], list[int]]]:
    """Drafts and what the target says in their place: from the end of the prompt on, every STRIDE tokens."""
    token_ids = [text.token_ids.tolist() for text in texts]
    longest = max(map(len, token_ids))
    runner = make_runner(strategy, student, len(texts), longest, StageTimer())
    vocab_size = student.get_input_embeddings().num_embeddings
    drafter = DraftModelDrafter(runner, vocab_size, vocab_size, draw_coupled, head_ids(student))
    greedy = SamplingParams(temperature=0.0, max_tokens=None)
    rows = [
        Sequence(
            str(row), greedy, tokens[: text.num_prompt_tokens], text.num_prompt_tokens, max_length=len(tokens)
        )
        for row, (text, tokens) in enumerate(zip(texts, token_ids, strict=True))
    ]
    pairs: list[tuple[list[int], list[int]]] = []
    while True:
        limits = [DEPTH if len(one.token_ids) + DEPTH <= one.max_length else 0 for one in rows]
        if not any(limits):
            return pairs
        drafts = drafter.propose(dict(enumerate(rows)), limits).token_ids.tolist()
        for tokens, one, drafted, limit in zip(token_ids, rows, drafts, limits, strict=True):
            end = len(one.token_ids)
            if limit:
                pairs.append((drafted, tokens[end : end + DEPTH]))
                one.token_ids.extend(tokens[end : end + STRIDE])
