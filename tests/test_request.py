import pytest

from batchspec import SamplingParams
from batchspec.request import Sequence


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.7}, r"temperature must be 0.0 \(greedy decoding\), got 0.7"),
        ({"temperature": False}, "temperature must be 0.0"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1 or None, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens must be at most max_tokens \(8\), got 9"),
        ({"stop": [""]}, "stop must be a non-empty string or a list of them"),
        ({"stop": [3]}, "stop must be a non-empty string or a list of them"),
        ({"stop": 3}, "stop must be a non-empty string or a list of them"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be a list of token ids"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams().stop_strings == ()


def test_a_row_drafts_no_more_than_its_budget_can_take():
    sequence = Sequence("a", SamplingParams(), [1, 2, 3], 3, max_length=6)
    assert [sequence.draft_limit(4)] == [2]  # two accepted and the next token fill it
    sequence.token_ids += [4, 5]
    assert sequence.draft_limit(4) == 0


def test_a_snapshot_is_not_changed_by_later_tokens():
    sequence = Sequence("a", SamplingParams(), [1], 1, max_length=9)
    sequence.append(5, accepted=True)
    output = sequence.to_output()
    sequence.append(6, accepted=False)
    assert output.outputs[0].token_ids == [5]
    assert output.metrics.accepted == [True]
