import math

import pytest
import torch

from batchspec.audit.answers import NOTHING, STOPPED, Answer, first_difference
from batchspec.audit.compare import compare, shortfall_of
from batchspec.audit.target import Target, seen_as_text

ENDS = frozenset([8, 9])
ROW = torch.tensor([5.0, 4.9, 3.0, 0.0, -1.0, -1.0, -1.0, -1.0, 4.95, -2.0], dtype=torch.float64)
"""Made-up logits: 0, the end token 8 and 1 are near each other, 2 is far."""


@pytest.mark.parametrize(
    ("expected", "got", "shortfall"),
    [
        (0, 1, 0.1),
        (1, 0, 0.1),
        (0, 2, 2.0),  # the first two are near, and the candidate chose the third
        (1, 2, 2.0),
        (2, 0, 2.0),
        (0, STOPPED, 0.05),  # the likelier one of the end tokens
        (0, NOTHING, math.inf),
        (NOTHING, 0, math.inf),
        (0, 10, math.inf),  # a token that the model does not have
    ],
)
def test_shortfall_is_that_of_the_lower_token(expected, got, shortfall):
    assert shortfall_of(ROW, expected, got, ENDS) == pytest.approx(shortfall)


@pytest.mark.parametrize(
    ("expected", "got", "position"),
    [
        ([1, 2, 9], [1, 2, 9], None),
        ([1, 2, 9], [1, 2, STOPPED], None),
        ([1, 2, 9], [1, 2, 8], 2),  # two end tokens, each known
        ([1, 2, 3], [1, 2, STOPPED], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 9], [1, 2, 9, 4], 3),
        ([1, 2], [4, 2], 0),
        ([1], [], 0),
    ],
)
def test_first_difference(expected, got, position):
    assert first_difference(expected, got, ENDS) == position


@pytest.fixture
def scripted(target):
    """The target, whose reference of prompt 0 begins with ten tokens of which the sixth is 0."""
    return Target(target.llm, target.prompts, 40, [[7, 7, 7, 7, 7, 0, 7, 7, 7, 7]])


def test_an_output_is_of_one_kind(scripted):
    reference = scripted.references[0]

    def judge(tokens, **fields):
        return compare(scripted, 0, Answer(tokens, **fields), lambda prompt, output: ROW, 0.2)

    assert judge(reference).kind == "identical"
    near = judge([*reference[:5], 1, 3, 3])
    assert (near.kind, near.num_shared, near.num_compared) == ("near-tie", 5, 6)
    assert near.divergence.margin == pytest.approx(0.05)
    assert near.divergence.shortfall == pytest.approx(0.1)
    assert (near.divergence.expected, near.divergence.got) == (0, 1)
    assert judge([*reference[:5], 2]).kind == "violation"
    assert judge(reference[:5]).kind == "violation"
    assert judge([*reference, 7]).kind == "violation"
    assert judge([]).kind == "violation"
    failed = judge([], error="it broke")
    assert (failed.kind, failed.error, failed.num_compared) == ("error", "it broke", 0)


def test_logits_are_asked_for_after_the_shared_tokens(scripted):
    asked = []

    def logits(prompt, output):
        asked.append((prompt, output))
        return ROW

    compare(scripted, 0, Answer([7, 7, 7, 1]), logits, 0.2)
    assert asked == [(scripted.prompts[0], [7, 7, 7])]


def test_text_is_compared_as_text(target):
    """A server's text becomes tokens as the reference's does, so that equal texts are equal."""
    for prompt in range(len(target.prompts)):
        view = seen_as_text(target.llm, target.references[prompt], target.ends)
        same = compare(target, prompt, Answer(view, is_text=True), None, 0.0)
        assert same.kind == "identical"
