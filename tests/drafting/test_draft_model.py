import random

from greedy import greedy
from hypothesis import given
from hypothesis import strategies as st
from scripted import VOCAB, ScriptedDrafter, ScriptedRunner, hashed_script, make_engine, run_to_end

from batchspec.drafting.budget import FixedBudget
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.sampling.method import draw_coupled


def drafter_of(script, num_rows=4, max_length=64):
    return DraftModelDrafter(ScriptedRunner(script, num_rows, max_length), VOCAB, VOCAB, draw_coupled)


prompts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=9)


@given(prompts, st.integers(0, 3), st.integers(1, 6))
def test_it_drafts_what_its_model_says_whatever_was_rejected_before(prompts, disagreement, num_tokens):
    """Each round's drafts equal those of a drafter without memory: the cache was rolled back right."""

    def draft_script(context):
        said = hashed_script(context)
        return (said + 1) % VOCAB if disagreement and len(context) % 4 < disagreement else said

    drafter = drafter_of(draft_script)
    without_memory = ScriptedDrafter(draft_script, lambda position: True)

    class Compared:
        budget = FixedBudget()

        def propose(self, batch, limits):
            draft, wanted = drafter.propose(batch, limits), without_memory.propose(batch, limits)
            assert draft.num_tokens == wanted.num_tokens
            assert draft.token_ids.tolist() == wanted.token_ids.tolist()
            return draft

        def release_row(self, row, last):
            drafter.release_row(row, last)

    engine = make_engine(hashed_script, Compared(), num_speculative_tokens=num_tokens)
    for serial, prompt in enumerate(prompts):
        engine.add_request(str(serial), prompt, greedy(max_tokens=3 + 5 * serial))
    run_to_end(engine)


def test_after_full_acceptance_the_missing_token_is_fed_along_with_the_newest():
    drafter = drafter_of(lambda context: 5)
    engine = make_engine(lambda context: 5, drafter, num_speculative_tokens=3)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=13, ignore_eos=True))
    engine.step()
    assert drafter.runner.tokens_per_forward == [3, 1, 1]  # the prompt, then one draft token each
    engine.step()
    assert drafter.runner.tokens_per_forward[3:] == [2, 1, 1]


def test_a_row_past_the_draft_model_s_window_is_not_drafted_and_the_others_are():
    drafter = drafter_of(lambda context: 5, max_length=10)
    engine = make_engine(lambda context: 5, drafter, num_speculative_tokens=4)
    engine.add_request("long", [1] * 12, greedy(max_tokens=8))
    engine.add_request("short", [1, 2], greedy(max_tokens=5))
    outputs = run_to_end(engine)
    assert outputs["long"].metrics.num_draft_tokens == 0
    assert outputs["short"].metrics.num_draft_tokens == 4
    assert outputs["long"].outputs[0].token_ids == [5] * 8


def test_a_long_prompt_is_prefilled_once_and_alone():
    drafter = drafter_of(hashed_script)
    engine = make_engine(hashed_script, drafter)
    engine.add_request("a", [1] * 40, greedy(max_tokens=12, ignore_eos=True))
    run_to_end(engine)
    assert drafter.runner.num_prefilled == 39


def test_each_step_is_announced_with_its_tokens_and_after_the_prompt_was_read():
    """What it takes is held against what so many tokens should; a long prompt is not part of it."""
    drafter, begun = drafter_of(lambda context: 5), []

    class Listening(FixedBudget):
        def begin_draft_step(self, num_tokens):
            runner = drafter.runner
            begun.append((num_tokens, runner.num_prefilled, runner.num_forwards))

    drafter.budget = Listening()
    engine = make_engine(lambda context: 5, drafter, num_speculative_tokens=2)
    engine.add_request("a", [1] * 40, greedy(max_tokens=13, ignore_eos=True))
    engine.step()
    engine.step()
    assert begun == [(1, 39, 0), (1, 39, 1), (2, 39, 2), (1, 39, 3)]


def test_the_budget_is_told_what_rows_have_to_read_first():
    """Prompts, and what came while a row was not drafted; a few tokens more of a step are none."""
    drafter, told = drafter_of(lambda context: 5), []

    class Resting(FixedBudget):
        def next_column(self, rows, marks, limits, beside=None, unread=None):
            if unread is None:  # behind a draft's first token
                return super().next_column(rows, marks, limits)
            told.append(unread[0])
            return [] if 2 <= len(told) < 20 else super().next_column(rows, marks, limits)

    drafter.budget = Resting()
    engine = make_engine(lambda context: 5, drafter, num_speculative_tokens=1)
    engine.add_request("a", [1] * 40, greedy(max_tokens=30, ignore_eos=True))
    run_to_end(engine)
    assert told[:4] == [40, 0, 0, 0]
    assert told[17:21] == [18, 19, 20, 0]


def test_tokens_outside_the_shared_vocabulary_are_never_drafted():
    drafter = DraftModelDrafter(ScriptedRunner(lambda context: VOCAB - 1, 1, 64), VOCAB - 1, VOCAB, draw_coupled)
    engine = make_engine(lambda context: 5, drafter, max_num_seqs=1)
    engine.add_request("a", [1], greedy(max_tokens=4))
    assert run_to_end(engine)["a"].outputs[0].token_ids == [5, 5, 5, 5]
    draft = drafter.propose({0: engine.intake.make_sequence("b", [1], greedy())}, [1])
    assert draft.token_ids.max() < VOCAB - 1


def test_a_row_with_a_token_that_the_draft_model_does_not_know_is_not_drafted():
    drafter = DraftModelDrafter(ScriptedRunner(lambda context: 5, 2, 64), VOCAB - 1, VOCAB, draw_coupled)
    engine = make_engine(lambda context: 5, drafter, max_num_seqs=2)
    engine.add_request("unknown", [1, VOCAB - 1, 2], greedy(max_tokens=6))
    engine.add_request("known", [1, 2], greedy(max_tokens=6))
    outputs = run_to_end(engine)
    assert outputs["unknown"].metrics.num_draft_tokens == 0
    assert outputs["known"].metrics.num_draft_tokens > 0
    assert outputs["unknown"].outputs[0].token_ids == outputs["known"].outputs[0].token_ids == [5] * 6


@given(prompts, st.integers(0, 1000))
def test_rows_that_were_left_out_for_some_rounds_draft_as_if_they_had_not_been(prompts, seed):
    """What was drafted for them before, and rejected, is forgotten, although they have grown past it since."""
    drafter = drafter_of(hashed_script)
    drafter.budget = LeavingOut(seed)
    without_memory = ScriptedDrafter(hashed_script, lambda position: True)

    class Compared:
        budget = FixedBudget()

        def propose(self, batch, limits):
            draft = drafter.propose(batch, limits)
            wanted = without_memory.propose(batch, draft.num_tokens)
            assert draft.token_ids.tolist() == wanted.token_ids.tolist()
            return draft

        def release_row(self, row, last):
            drafter.release_row(row, last)

    engine = make_engine(
        lambda context: hashed_script(context) % (VOCAB - 1), Compared(), num_speculative_tokens=3
    )
    for serial, prompt in enumerate(prompts):
        engine.add_request(str(serial), prompt, greedy(max_tokens=25))
    run_to_end(engine)


class LeavingOut(FixedBudget):
    def __init__(self, seed):
        self.random = random.Random(seed)

    def next_column(self, rows, marks, limits, beside=None, unread=None):
        return [place for place in super().next_column(rows, marks, limits) if self.random.random() < 0.5]
