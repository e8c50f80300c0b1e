import torch
from greedy import greedy
from hypothesis import given
from hypothesis import strategies as st

from batchspec.drafting.ngram import NgramDrafter, NgramIndex
from batchspec.request import Sequence

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def lookup_by_scanning(tokens, longest, shortest, limit):
    """Longest match first, newest match first, by looking everywhere."""
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                while len(text) < len(tokens) + limit:
                    text.append(text[start + size + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_lookup_equals_a_scan_of_the_whole_text(tokens, shortest, more, limit):
    longest = shortest + more
    got = NgramIndex(longest, shortest).lookup(tokens, limit)
    assert got == lookup_by_scanning(tokens, longest, shortest, limit)


@given(texts, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6))
def test_an_index_that_grew_with_its_text_equals_a_new_one(tokens, additions):
    index = NgramIndex(3, 1)
    for addition in [[], *additions]:
        tokens = tokens + addition
        assert index.lookup(tokens, 4) == NgramIndex(3, 1).lookup(tokens, 4)


def sequence(*tokens):
    return Sequence("r", greedy(), list(tokens), len(tokens), 100)


def test_rows_draft_at_most_their_limit_and_nothing_without_a_match():
    drafter = NgramDrafter(3, 3, 1, torch.device("cpu"))
    draft = drafter.propose({0: sequence(1, 2, 3, 1), 1: sequence(1, 2, 3, 4), 2: sequence(5, 5)}, [2, 2, 0])
    assert draft.num_tokens == [2, 0, 0]
    assert draft.token_ids.tolist() == [[2, 3], [0, 0], [0, 0]]


def test_a_released_row_s_text_is_forgotten_and_the_last_row_s_moves_along():
    drafter = NgramDrafter(2, 3, 1, torch.device("cpu"))
    first, second = sequence(7, 8, 7), sequence(1, 2, 3, 1)
    drafter.propose({0: first, 1: second}, [2, 2])
    drafter.release_row(0, last=1)
    second.append(2, accepted=False)
    assert drafter.propose({0: second}, [2]).token_ids.tolist() == [[3, 1]]
    drafter.release_row(0, last=0)
    # Shorter than what the row held before: an index of the old text would take it for indexed.
    assert drafter.propose({0: sequence(9, 4, 9)}, [1]).token_ids.tolist() == [[4]]
