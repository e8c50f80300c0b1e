import pytest
import suffix_scan as scan
import torch
from greedy import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same, run
from scripted import VOCAB, hashed_script, make_engine, run_to_end
from toy_llm import MODEL, STRATEGIES, TOKENIZER, make_llm

from batchspec import LLM, SamplingParams
from batchspec.drafting.budget import FixedBudget
from batchspec.drafting.estimates import match_mark
from batchspec.drafting.suffix import SuffixDrafter
from batchspec.drafting.suffix_automaton import SEPARATOR
from batchspec.drafting.suffix_store import SuffixStore
from batchspec.request import Sequence

CPU = torch.device("cpu")
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def sequence(*prompt):
    return Sequence("r", greedy(), list(prompt), len(prompt), 100)


def grown(row, *output):
    for token in output:
        row.append(token, accepted=False)
    return row


def ended(row):
    row.finish_reason = "stop"
    return row


def drafter_with_store(max_tokens=1000, num_segments=1, min_match=1):
    return SuffixDrafter(min_match, CPU, SuffixStore(max_tokens, num_segments))


def drafts_of(drafter, batch, limits):
    draft = drafter.propose(batch, limits)
    assert [len(marks) for marks in draft.marks] == draft.num_tokens
    return [ids[:size] for ids, size in zip(draft.token_ids.tolist(), draft.num_tokens, strict=True)]


def draft_by_scanning(text, stored, min_match, limit):
    """Token ids and marks: of the longer match, the own text's of equally long ones."""
    own, other = scan.repeated_suffix(text), scan.shared_suffix(stored, text)
    sources = [("store", stored, other)] if len(other) > len(own) else []
    for source, source_text, suffix in [*sources, ("own", text, own)]:
        if len(suffix) >= min_match and (drafted := scan.walk(source_text, suffix, limit)):
            return [one[0] for one in drafted], [match_mark(source, *one[1:]) for one in drafted]
    return [], []


@given(
    st.lists(tokens, max_size=3),
    st.lists(tokens, min_size=2, max_size=2),
    st.lists(st.tuples(tokens, tokens, st.integers(0, 5), st.integers(0, 5)), max_size=4),
    st.integers(1, 3),
)
def test_drafts_and_their_marks_are_those_of_a_scan_as_rows_grow(outputs, prompts, rounds, min_match):
    drafter = drafter_with_store(min_match=min_match)
    for output in outputs:
        drafter.store.add(output)
    stored = [token for output in outputs for token in [*output, SEPARATOR]]
    batch = dict(enumerate(sequence(*prompt) for prompt in prompts))
    for *gains, first_limit, second_limit in rounds:
        limits = [first_limit, second_limit]
        wanted = [
            draft_by_scanning(row.token_ids, stored, min_match, limit) if limit else ([], [])
            for row, limit in zip(batch.values(), limits, strict=True)
        ]
        draft = drafter.propose(batch, limits)
        assert draft.marks == [marks for _, marks in wanted]
        drafted = zip(draft.token_ids.tolist(), draft.num_tokens, strict=True)
        assert [ids[:size] for ids, size in drafted] == [ids for ids, _ in wanted]
        for row, gain in zip(batch.values(), gains, strict=True):
            grown(row, *gain)


def test_an_output_goes_to_the_store_when_its_row_is_released_and_its_prompt_does_not():
    drafter = drafter_with_store()
    first, second = sequence(1, 2, 3), sequence(7, 1, 2)
    assert drafts_of(drafter, {0: first, 1: second}, [3, 3]) == [[], []]
    ended(grown(first, 4, 5, 6))  # what came in its last round was never proposed from
    drafter.release_row(0, last=1)
    assert drafts_of(drafter, {0: second}, [3]) == [[]]  # "1 2" was followed by 3 in a prompt
    draft = drafter.propose({0: grown(second, 4)}, [3])
    assert draft.token_ids.tolist() == [[5, 6]]
    assert draft.marks == [[match_mark("store", 1), match_mark("store", 2)]]


def test_the_last_row_s_text_moves_along_when_a_row_is_released():
    drafter = SuffixDrafter(1, CPU)
    first, second = sequence(7, 8, 7), sequence(1, 2, 3, 1)
    drafter.propose({0: first, 1: second}, [2, 2])
    text = drafter._rows[1].text
    drafter.release_row(0, last=1)
    assert drafter._rows[0].text is text  # not indexed again
    assert drafts_of(drafter, {0: grown(second, 2)}, [2]) == [[3, 1]]
    drafter.release_row(0, last=0)
    assert drafts_of(drafter, {0: sequence(9, 4, 9)}, [1]) == [[4]]


def test_the_segment_with_the_longest_match_drafts_though_another_was_used_last():
    drafter = drafter_with_store(max_tokens=12, num_segments=2)
    drafter.store.add([1, 2, 3, 4])
    drafter.store.add([8, 3, 9])
    assert drafts_of(drafter, {0: sequence(2, 3)}, [3]) == [[4]]
    assert drafts_of(drafter, {0: sequence(7, 3)}, [3]) == [[4]]  # equally long: the one that was of use last
    assert drafts_of(drafter, {0: sequence(8, 3)}, [3]) == [[9]]
    assert drafts_of(drafter, {0: sequence(7, 3)}, [3]) == [[9]]


def test_a_row_that_is_handed_to_a_sibling_drafts_from_the_sibling_s_text_and_the_output_before():
    drafter = drafter_with_store(min_match=2)
    first = sequence(1, 2, 3)
    sibling = Sequence("r", greedy(), [1, 2, 3], 3, 100, siblings=first.siblings)
    drafter.propose({0: first}, [4])
    ended(grown(first, 5, 6, 1, 2))
    drafter.release_row(0, last=0)
    assert drafts_of(drafter, {0: sibling}, [4]) == [[]]
    assert drafts_of(drafter, {0: grown(sibling, 5, 6)}, [4]) == [[1, 2]]
    draft = drafter.propose({0: grown(sibling, 1, 2)}, [4])
    assert draft.token_ids.tolist() == [[3, 5, 6, 1]]
    assert {mark.source for mark in draft.marks[0]} == {"own"}  # where its own match is longer, or as long


def test_a_row_whose_owner_changed_unsaid_starts_anew():
    """As when releasing rows is cut off: what is remembered goes with the sequence, not with the row's number."""
    drafter = SuffixDrafter(1, CPU)
    drafter.propose({0: sequence(1, 2, 1)}, [2])
    assert drafts_of(drafter, {0: sequence(3, 4, 3, 4, 3)}, [2]) == [[4, 3]]


def test_only_sequences_that_have_ended_are_stored_and_each_once():
    drafter = drafter_with_store()
    first, running = sequence(1), sequence(2)
    drafter.propose({0: first, 1: running}, [1, 1])
    ended(grown(first, 5, 6))
    grown(running, 7, 8, 9)
    for _ in range(2):  # the second time as if the first was cut off behind the drafter
        drafter.release_row(0, last=1)
    assert drafter.store.num_tokens == 3


def test_without_a_store_nothing_of_a_released_row_is_kept():
    drafter = SuffixDrafter(1, CPU)
    drafter.propose({0: sequence(1, 2, 1)}, [2])
    drafter.release_row(0, last=0)
    assert drafter._rows == {}


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), min_size=1, max_size=7))
def test_rejected_drafts_are_not_remembered(prompts):
    """Each round's drafts are those of a drafter that sees the committed tokens for the first time."""
    drafter = SuffixDrafter(1, CPU)

    class Compared:
        budget = FixedBudget()

        def propose(self, batch, limits):
            fresh = SuffixDrafter(1, CPU).propose(batch, limits)
            draft = drafter.propose(batch, limits)
            assert draft.token_ids.tolist() == fresh.token_ids.tolist()
            assert draft.num_tokens == fresh.num_tokens
            return draft

        def release_row(self, row, last):
            drafter.release_row(row, last)

    engine = make_engine(hashed_script, Compared(), max_num_seqs=3)
    for serial, prompt in enumerate(prompts):
        engine.add_request(str(serial), prompt, greedy(max_tokens=5 + 5 * serial))
    run_to_end(engine)
    assert drafter._rows == {}


def make_suffix_llm(strategy="packed", num_speculative_tokens=5, **settings):
    config = {"method": "suffix", "num_speculative_tokens": num_speculative_tokens} | settings
    return LLM(MODEL, tokenizer=TOKENIZER, speculative_config=config, max_num_seqs=3, strategy=strategy)


PROMPTS = ["the cat and the cat", "a b a b a b", "Once", "z", "one two one two", "the cat sat"]
REQUESTS = [
    (prompt, SamplingParams(temperature=temperature, seed=serial, max_tokens=10 + 4 * serial, logprobs=1))
    for serial, prompt in enumerate(PROMPTS)
    for temperature in (0.0, 0.7)
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("store", [0, 1000])
def test_it_changes_no_output_of_a_model(strategy, store):
    llm = make_suffix_llm(strategy, suffix_min_match=1, suffix_store_tokens=store)
    reference = run(make_llm(), REQUESTS)
    for _ in range(2):  # with a store the second time nearly all is drafted
        assert_same(run(llm, REQUESTS), reference)
    assert llm.engine.stats.num_accepted_tokens > 0


def test_with_a_store_an_answer_given_again_is_drafted_whole():
    requests = [(prompt, greedy(max_tokens=40, ignore_eos=True)) for prompt in PROMPTS]
    rates = {}
    for store in (0, 2000):
        llm = make_suffix_llm(num_speculative_tokens=7, suffix_store_tokens=store)
        run(llm, requests)
        outputs = run(llm, requests)
        rates[store] = sum(output.metrics.num_rounds for output in outputs)
    assert rates[2000] < 60  # six answers of 40 tokens; at most 8 tokens per round
    assert rates[2000] < 0.6 * rates[0]
