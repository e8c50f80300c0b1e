"""What is trained, and what the loss pulls it to."""

from __future__ import annotations

import pytest
import torch
from toy_models import make_model

from batchspec.models.draft_checkpoint import own_weights
from batchspec.models.prepacking import can_prepack, prepacked_copy
from batchspec.training.hidden import HiddenStates
from batchspec.training.lines import lines_of
from batchspec.training.loss import distance
from batchspec.training.measure import DEPTH, _rollouts, acceptance, agreement
from batchspec.training.shards import Text
from batchspec.training.student import (
    frequent_ids,
    logits_by_depth,
    logits_of,
    make_student,
    texts_per_line,
    vocabulary_places,
)


def told_by(model, prompts, answer_tokens=12, k=4):
    """Greedy answers of a model with its most probable tokens."""
    texts = []
    for prompt in prompts:
        tokens = list(prompt)
        tops = []
        for _ in range(answer_tokens):
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            tops.append(logprobs.topk(k))
            tokens.append(int(tops[-1].indices[0]))
        ids = torch.stack([top.indices for top in tops]).int()
        texts.append(
            Text(
                torch.tensor(tokens).int(),
                len(prompt),
                ids,
                torch.stack([top.values for top in tops]).half(),
                True,
            )
        )
    return texts


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "qwen2_sliding"])
def test_a_student_of_all_layers_agrees_in_full_in_lines_of_many_texts_or_one(family):
    target = make_model(family).float()
    texts = told_by(target, PROMPTS)
    student = make_student(target, list(range(target.config.num_hidden_layers)), None)
    lines = lines_of(texts, 64, texts_per_line(student))
    assert len(lines) == (3 if family == "opt" else 1)  # OPT counts positions by itself
    assert agreement(student, lines) > 0.9  # bfloat16 may turn a tie
    assert acceptance(student, texts, "packed") == [1.0] * DEPTH
    loss = [
        distance(logits_of(student, line), line.top_ids, line.top_logprobs, torch.arange(96), hard_share=0.0)
        for line in lines
    ]
    assert max(loss) < 1e-2


def test_a_student_of_fewer_layers_agrees_less_and_is_judged_by_whole_drafts():
    target = make_model("gemma2").float()
    texts = told_by(target, PROMPTS)
    student = make_student(target, [0, 3], None)
    accepted = acceptance(student, texts, "packed")
    assert 1.0 > accepted[0] >= accepted[1] >= accepted[2] >= accepted[3]
    assert agreement(student, lines_of(texts, 64, 99)) < 1.0


@pytest.mark.parametrize("packed", [False, True])
def test_only_its_own_weights_learn_and_through_the_whole_head_s_gradient(packed):
    target = make_model("llama").float()
    if packed:
        if not can_prepack(torch.float32):
            pytest.skip("this PyTorch cannot prepack weights")
        target = prepacked_copy(target)
    student = make_student(target, [0], torch.arange(0, 96, 2))
    (line,) = lines_of(told_by(target, PROMPTS), 64, 99)
    places = vocabulary_places(student, 96, torch.device("cpu"))
    distance(logits_of(student, line), line.top_ids, line.top_logprobs, places, 0.5).backward()
    own = {id(weight) for weight in own_weights(student).values()}
    for name, weight in student.named_parameters():
        assert (weight.grad is not None and bool(weight.grad.any())) == (id(weight) in own), name


def test_the_loss_is_least_at_the_target_s_own_distribution():
    wanted = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1)
    top = wanted.topk(3)
    places = torch.arange(4)

    def at(logits):
        return float(distance(logits, top.indices, top.values, places, hard_share=0.0))

    assert abs(at(wanted)) < 1e-6
    for step in torch.eye(4):
        assert at(wanted + 0.3 * step) > 1e-3


def test_tokens_that_the_head_cannot_say_teach_nothing():
    places = torch.tensor([-1, 0, 1])
    top_ids, top_logprobs = torch.tensor([[0]]), torch.tensor([[0.0]])
    logits = torch.randn(1, 2, requires_grad=True)
    distance(logits, top_ids, top_logprobs, places, 1.0).backward()
    assert not logits.grad.any()


def test_frequent_ids_are_those_that_the_target_is_likely_to_say():
    top_ids = torch.tensor([[5, 2], [5, 7], [9, 5]]).int()
    text = Text(
        torch.arange(5).int(), 2, top_ids, torch.tensor([[0.6, 0.3], [0.9, 0.05], [0.5, 0.4]]).log().half(), True
    )
    assert frequent_ids([text], 2, 12).tolist() == [5, 9]
    assert frequent_ids([text], 6, 12).tolist() == [0, 1, 2, 5, 7, 9]
    assert frequent_ids([text], 0, 12) is None
    assert frequent_ids([text], 12, 12) is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_feature_student_is_trained_on_what_it_meets_in_a_draft(family):
    """At the end of each prompt, the first depth gives the token that the drafter drafts from the same states."""
    target = make_model(family).float()
    texts = told_by(target, PROMPTS, answer_tokens=6)
    student = make_student(target, [target.config.num_hidden_layers - 1], None, "feature")
    with torch.no_grad():  # untrained, it takes no notice of the features
        own_weights(student)["fuse.weight"].copy_(torch.eye(48).repeat(1, 2))
    hidden = HiddenStates(target)
    lines = lines_of(texts, 64, texts_per_line(student))
    assert len(lines) == 1
    with torch.no_grad():
        each = logits_by_depth(student, lines[0], hidden.before(lines[0]), 2)
    starts = [0, 6, 12]  # of the answers among the places of the line
    rollouts = _rollouts(student, texts, "packed", hidden)
    assert [drafted[0] for drafted, _ in rollouts[:3]] == each[0][starts].argmax(dim=-1).tolist()
    assert not torch.equal(each[0], each[1])
