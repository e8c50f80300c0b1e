"""How good the student is on texts that it was not trained on."""

from __future__ import annotations

from typing import Any

import torch

from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.feature import FeatureDrafter
from batchspec.models.capability import make_runner
from batchspec.models.features import FeatureStore
from batchspec.models.runner import FeatureRunner
from batchspec.models.short_head import head_ids
from batchspec.request import Sequence
from batchspec.sampling.method import draw_coupled
from batchspec.sampling_params import SamplingParams
from batchspec.stats import StageTimer
from batchspec.training.hidden import HiddenStates
from batchspec.training.lines import Line
from batchspec.training.shards import Text
from batchspec.training.student import logits_by_depth, logits_of, vocabulary_places

DEPTH = 4
"""Draft tokens that are rolled out."""

STRIDE = 5
"""Tokens from one rollout of a text to the next."""

NUM_ROWS = 16


@torch.no_grad()
def agreement(student: Any, lines: list[Line], hidden: HiddenStates | None = None) -> float:
    """Share of the places at which the student's most probable token is the target's; `hidden` for a student of
    kind `feature`."""
    places = vocabulary_places(student, student.get_input_embeddings().num_embeddings, lines[0].token_ids.device)
    agreed = total = 0
    for line in lines:
        wanted = places[line.top_ids[:, 0]]
        if hidden is None:
            logits = logits_of(student, line)
        else:
            logits = logits_by_depth(student, line, hidden.before(line), 1)[0]
        agreed += int((logits.argmax(dim=-1) == wanted).sum())
        total += len(wanted)
    return agreed / max(total, 1)


@torch.no_grad()
def acceptance(student: Any, texts: list[Text], strategy: str, hidden: HiddenStates | None = None) -> list[float]:
    """Share of drafts whose first 1, 2, ... DEPTH tokens are the target's: drafted along greedy answers, by the
    drafter that will draft in an engine. All 0.0 if no answer is long enough."""
    texts = [text for text in texts if text.is_greedy and text.num_answer_tokens > DEPTH]
    matched, total = [0] * DEPTH, 0
    for start in range(0, len(texts), NUM_ROWS):
        for drafted, wanted in _rollouts(student, texts[start : start + NUM_ROWS], strategy, hidden):
            total += 1
            for depth in range(DEPTH):
                matched[depth] += drafted[: depth + 1] == wanted[: depth + 1]
    return [count / max(total, 1) for count in matched]


def _drafter(student: Any, texts: list[Text], strategy: str, hidden: HiddenStates | None) -> DraftModelDrafter:
    longest = max(len(text.token_ids) for text in texts)
    size = student.get_input_embeddings().num_embeddings
    if hidden is None:
        runner = make_runner(strategy, student, len(texts), longest, StageTimer())
        return DraftModelDrafter(runner, size, size, draw_coupled, head_ids(student))
    store = FeatureStore(hidden.target)
    store.features = torch.nn.utils.rnn.pad_sequence([hidden.of(text) for text in texts], batch_first=True)
    feature_runner = FeatureRunner(student, len(texts), longest)
    return FeatureDrafter(feature_runner, store, size, draw_coupled, head_ids(student))


def _rollouts(
    student: Any, texts: list[Text], strategy: str, hidden: HiddenStates | None
) -> list[tuple[list[int], list[int]]]:
    """Drafts and what the target says in their place: from the end of the prompt on, every STRIDE tokens."""
    token_ids = [text.token_ids.tolist() for text in texts]
    drafter = _drafter(student, texts, strategy, hidden)
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
