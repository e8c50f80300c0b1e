import sys

import pytest
import suffix_scan as scan
from hypothesis import given
from hypothesis import strategies as st

from batchspec.drafting import suffix_automaton
from batchspec.drafting.suffix_automaton import COUNTED_LINKS, ROOT, SuffixAutomaton

tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=COUNTED_LINKS)  # no suffix of these is beyond the bound on counting
long_texts = st.lists(tokens, min_size=40, max_size=80) | st.integers(40, 80).map(lambda size: [1] * size)


def automaton_of(text):
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def place_of(automaton, run):
    place = ROOT, 0
    for token in run:
        place = automaton.advance(*place, token)
    return place


@given(texts, st.integers(0, 6))
def test_a_growing_text_s_repeated_suffix_its_followers_and_drafts_are_those_of_a_scan(text, limit):
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, 1):
        automaton.append(token)
        so_far = text[:size]
        suffix = scan.repeated_suffix(so_far)
        state, length = automaton.repeated_suffix()
        assert (automaton.num_tokens, length) == (size, len(suffix))
        if length:  # the empty run is followed by every token, which nobody asks
            assert automaton.followers(state) == scan.followers(so_far, suffix)
            assert automaton.walk(state, length, limit) == scan.walk(so_far, suffix, limit)


@given(texts, texts)
def test_reading_another_text_finds_its_longest_suffix_that_occurs(text, other):
    automaton, place = automaton_of(text), (ROOT, 0)
    for size, token in enumerate(other, 1):
        place = automaton.advance(*place, token)
        suffix = scan.shared_suffix(text, other[:size])
        assert place[1] == len(suffix)
        if suffix:
            assert automaton.followers(place[0]) == scan.followers(text, suffix)
            assert place == place_of(automaton, suffix)


def test_two_texts_with_a_separator_between_do_not_meet():
    automaton = automaton_of([1, 2, suffix_automaton.SEPARATOR, 3, 1, 2, suffix_automaton.SEPARATOR])
    state, length = place_of(automaton, [1, 2])
    assert length == 2
    assert automaton.followers(state) == {}
    assert automaton.walk(state, length, 4) == []
    assert [token for token, _, _ in automaton.walk(*place_of(automaton, [3]), 4)] == [1, 2]


@given(long_texts)
def test_beyond_the_bound_matches_stay_exact_and_counts_are_not_above_the_truth(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_automaton, "COUNTED_LINKS", 3)
        automaton = automaton_of(text)
    suffix = scan.repeated_suffix(text)
    state, length = automaton.repeated_suffix()
    counted, true = automaton.followers(state), scan.followers(text, suffix)
    assert length == len(suffix)
    assert counted.keys() == true.keys()
    assert all(1 <= counted[token] <= true[token] for token in true)
    assert all(0 < share <= 1 for _, _, share in automaton.walk(state, length, 8))


def num_lines_run(work):
    """Lines of the automaton's code that ran: time that does not depend on the machine."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != suffix_automaton.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


PERIODIC = {"aaaa": [1], "abab": [1, 2], "aab": [1, 1, 2]}


@pytest.mark.parametrize("name", PERIODIC)
def test_twice_the_text_takes_twice_the_steps(name):
    def steps(size):
        text = (PERIODIC[name] * size)[:size]
        return num_lines_run(lambda: automaton_of(text))

    steps(10)  # first calls import and compile
    assert steps(1200) < 2.2 * steps(600)


def test_reading_takes_as_many_steps_as_there_are_tokens_however_often_it_falls_back():
    automaton = automaton_of([1] * 600)

    def steps(size):
        return num_lines_run(lambda: place_of(automaton, ([1] * 99 + [2]) * (size // 100)))

    assert steps(1200) < 2.2 * steps(600)


@given(long_texts)
def test_states_are_at_most_two_per_token(text):
    assert len(automaton_of(text)._length) <= 2 * len(text)
