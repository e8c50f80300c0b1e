"""Scripted verification: every way in which a block can end."""

import pytest
from greedy import greedy
from scripted import VOCAB, ScriptedDrafter, expected, hashed_script, make_engine, run_to_end

K = 4


def countdown(eos_at):
    """Says 1, 2, 1, 2, ... and an end token when `eos_at` tokens are there."""
    return lambda context: 0 if len(context) == eos_at else 1 + len(context) % 2


def generate(script, params, is_right, prompt=(3, 4, 5), num_speculative_tokens=K, **settings):
    drafter = ScriptedDrafter(script, is_right)
    engine = make_engine(script, drafter, num_speculative_tokens=num_speculative_tokens, **settings)
    engine.add_request("a", list(prompt), params)
    return run_to_end(engine)["a"]


def never(position):
    return False


def always(position):
    return True


def sometimes(position):
    return position % 3 != 0


@pytest.mark.parametrize("is_right", [never, always, sometimes])
@pytest.mark.parametrize("eos_at", range(3, 3 + 2 * (K + 1)))
def test_an_end_token_at_any_position_of_a_block_ends_the_request_there(eos_at, is_right):
    output = generate(countdown(eos_at), greedy(max_tokens=40), is_right)
    tokens, reason, stop = expected(countdown(eos_at), [3, 4, 5], greedy(max_tokens=40))
    completion = output.outputs[0]
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (tokens, reason, stop)
    assert completion.token_ids[-1] == 0
    assert output.metrics.num_output_tokens == len(completion.token_ids) == len(output.metrics.accepted)


@pytest.mark.parametrize("is_right", [never, always, sometimes])
@pytest.mark.parametrize("max_tokens", range(1, 2 * (K + 1) + 1))
def test_a_budget_ending_at_any_position_of_a_block_is_kept_exactly(max_tokens, is_right):
    output = generate(countdown(1000), greedy(max_tokens=max_tokens), is_right)
    assert len(output.outputs[0].token_ids) == max_tokens
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("is_right", [never, always, sometimes])
@pytest.mark.parametrize("prompt_length", range(1, 16))
def test_the_context_window_is_filled_to_its_last_token_and_not_passed(prompt_length, is_right):
    output = generate(
        countdown(1000), greedy(max_tokens=None), is_right, prompt=[3] * prompt_length, max_model_len=16
    )
    assert len(output.outputs[0].token_ids) == 16 - prompt_length
    assert output.outputs[0].finish_reason == "length"


def test_full_acceptance_gains_k_plus_one_tokens_a_round():
    output = generate(countdown(1000), greedy(max_tokens=3 * (K + 1)), always)
    assert output.metrics.num_rounds == 3
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens == 3 * K
    assert output.metrics.mean_acceptance_length == K + 1
    assert output.metrics.accepted == ([True] * K + [False]) * 3


def test_no_acceptance_gains_the_target_s_own_token_a_round():
    output = generate(countdown(1000), greedy(max_tokens=6), never)
    assert output.metrics.num_rounds == 6
    assert output.metrics.num_accepted_tokens == 0
    assert output.metrics.accepted == [False] * 6


def test_tokens_behind_an_end_token_are_counted_nowhere():
    output = generate(countdown(5), greedy(max_tokens=40), always)  # block: 2, 1, end, ...
    assert output.outputs[0].token_ids == [2, 1, 0]
    assert output.metrics.num_accepted_tokens == 3
    assert output.metrics.num_output_tokens == 3


def test_every_end_token_of_the_set_is_honoured():
    for end in (7, 9):
        script = lambda context, end=end: end if len(context) == 6 else 1  # noqa: E731
        output = generate(script, greedy(max_tokens=40), always, eos=frozenset({7, 9}))
        assert output.outputs[0].token_ids == [1, 1, 1, end]
        assert output.outputs[0].stop_reason is None


def test_end_tokens_in_the_prompt_end_nothing():
    output = generate(countdown(1000), greedy(max_tokens=5), sometimes, prompt=[0, 0, 3, 0])
    assert len(output.outputs[0].token_ids) == 5


def test_a_stop_token_names_itself_and_ignore_eos_goes_on():
    params = greedy(max_tokens=12, stop_token_ids=[2], ignore_eos=True)
    output = generate(lambda context: 2 if len(context) == 8 else 0, params, always)
    assert output.outputs[0].token_ids == [0, 0, 0, 0, 0, 2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 2)


@pytest.mark.parametrize("is_right", [never, always, sometimes])
@pytest.mark.parametrize("min_tokens", range(12))
def test_min_tokens_forbids_end_tokens_position_by_position(min_tokens, is_right):
    """The script wants to end at every third token; drafts of forbidden ends are rejected like any wrong guess."""

    def script(context):
        return 0 if len(context) % 3 == 0 else 1 + hashed_script(context) % (VOCAB - 1)

    params = greedy(max_tokens=20, min_tokens=min_tokens)
    output = generate(script, params, is_right)
    tokens, reason, _ = expected(script, [3, 4, 5], params)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (tokens, reason)


def test_a_row_near_its_budget_does_not_shorten_the_drafts_of_others():
    script = countdown(1000)
    engine = make_engine(script, ScriptedDrafter(script, always), num_speculative_tokens=K)
    engine.add_request("short", [3], greedy(max_tokens=2))
    engine.add_request("long", [3], greedy(max_tokens=20))
    drafted = {output.request_id: output.metrics.num_draft_tokens for output in engine.step()}
    assert drafted == {"short": 1, "long": K}


def test_a_round_is_one_forward_pass_of_the_tokens_that_the_rows_add():
    script = countdown(1000)
    engine = make_engine(script, ScriptedDrafter(script, always), num_speculative_tokens=K)
    engine.add_request("a", [3], greedy(max_tokens=2))
    engine.add_request("b", [3], greedy(max_tokens=20))
    engine.step()
    assert engine.runner.tokens_per_forward == [(1 + 1) + (1 + K)]
