from batchspec import SamplingParams
from batchspec.request import Sequence


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
