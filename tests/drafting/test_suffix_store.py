import weakref

import pytest
import suffix_scan as scan
from hypothesis import given
from hypothesis import strategies as st

from batchspec.drafting import suffix_automaton, suffix_store
from batchspec.drafting.suffix_automaton import SEPARATOR, SuffixAutomaton
from batchspec.drafting.suffix_store import SuffixStore

outputs = st.lists(st.integers(0, 2), min_size=1, max_size=12)
events = st.lists(st.tuples(st.sampled_from(["output", "row"]), outputs), max_size=12)


def follow_beside_texts(events, catch_up):
    """A row that grows while outputs come in; gives matches beside the one segment's text and the row's."""
    store, text, row, cursors = SuffixStore(1000, num_segments=1), [], [2], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_store, "CATCH_UP", catch_up)
        patch.setattr(suffix_automaton, "COUNTED_LINKS", 1000)  # exact counts
        for kind, tokens in events:
            if kind == "output":
                store.add(tokens)
                text = [*text, *tokens, SEPARATOR]
            else:
                row = row + tokens
                cursors = store.follow(cursors, row)
                for cursor in cursors:
                    yield cursor, text, row


@given(events)
def test_a_row_s_match_is_the_longest_though_outputs_come_in_between(events):
    for cursor, text, row in follow_beside_texts(events, catch_up=200):
        suffix = scan.shared_suffix(text, row)
        assert cursor.length == len(suffix)
        if suffix:
            assert cursor.segment.walk(cursor.state, cursor.length, 4) == scan.walk(text, suffix, 4)


@given(events)
def test_a_match_longer_than_what_is_read_anew_is_a_match_and_at_least_as_long_as_that(events):
    for cursor, text, row in follow_beside_texts(events, catch_up=3):
        longest = len(scan.shared_suffix(text, row))
        assert min(longest, 3) <= cursor.length <= longest
        run = row[len(row) - cursor.length :]
        assert not run or cursor.segment.followers(cursor.state) == scan.followers(text, run)


@given(st.lists(outputs, max_size=30), st.integers(4, 40), st.integers(1, 4))
def test_the_bound_holds_and_the_newest_output_is_there_as_far_as_it_fits(outputs, max_tokens, num_segments):
    max_tokens = max(max_tokens, 2 * num_segments)
    store = SuffixStore(max_tokens, num_segments)
    for output in outputs:
        store.add(output)
        assert store.num_tokens <= max_tokens
        assert len(store.segments) <= num_segments
        part = output[-1:]
        assert max(cursor.length for cursor in store.follow([], part)) == 1


def test_a_segment_that_gave_a_draft_outlives_newer_ones_that_did_not():
    store = SuffixStore(max_tokens=12, num_segments=3)
    for output in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        store.add(output)
    [cursor] = [cursor for cursor in store.follow([], [1, 2]) if cursor.length == 2]
    assert [drafted.token_id for drafted in store.walk(cursor, 4)] == [3]
    store.add([10, 11, 12])

    def is_known(run):
        return any(cursor.length == len(run) for cursor in store.follow([], run))

    assert [is_known(run) for run in ([1, 2], [4, 5], [7, 8], [10, 11])] == [True, False, True, True]


def test_a_look_up_in_vain_is_no_use_of_a_segment():
    store = SuffixStore(max_tokens=8, num_segments=2)
    store.add([1, 2, 3])
    store.add([4, 5, 6])
    oldest = store.segments[0]
    [cursor] = [cursor for cursor in store.follow([], [2, 3]) if cursor.length]
    assert cursor.segment is oldest
    assert store.walk(cursor, 4) == []  # only the output's end followed
    store.add([7])
    assert oldest not in store.segments


def test_a_row_lets_go_of_a_dropped_segment_and_reads_the_new_one():
    store = SuffixStore(max_tokens=8, num_segments=2)
    store.add([1, 2, 3])
    store.add([4, 5, 6])
    cursors = store.follow([], [9, 1, 2])
    dropped = weakref.ref(store.segments[0])
    store.add([2, 8, 7])
    cursors = store.follow(cursors, [9, 1, 2, 8])
    assert [cursor.length for cursor in cursors] == [2, 0]
    assert dropped() is None


def test_no_match_goes_from_one_output_into_the_next():
    store = SuffixStore(max_tokens=100)
    store.add([1, 2])
    store.add([3, 4])
    [cursor] = store.follow([], [1, 2, 3])
    assert cursor.length == 1
    assert [drafted.token_id for drafted in store.walk(cursor, 4)] == [4]


def test_an_output_that_is_cut_off_while_it_is_added_leaves_nothing_half_made(monkeypatch):
    store, append, calls = SuffixStore(max_tokens=20, num_segments=2), SuffixAutomaton._add_state, []

    def interrupted(automaton, length):
        calls.append(length)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return append(automaton, length)

    store.add([1, 2, 3])
    monkeypatch.setattr(SuffixAutomaton, "_add_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add([1, 2, 3, 4, 5, 6, 7])
    assert store.segments == []
    store.add([1, 2, 3])
    [cursor] = store.follow([], [1, 2])
    assert [drafted.token_id for drafted in store.walk(cursor, 4)] == [3]


def test_a_memory_without_room_for_a_token_in_each_segment_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 2 for each of 8 segments, got 15"):
        SuffixStore(max_tokens=15)
