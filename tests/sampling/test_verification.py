import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.sampling.verification import verify_equal

VOCAB = 4
row = st.integers(0, 5).flatmap(
    lambda k: st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=k, max_size=k),
        st.lists(st.integers(0, VOCAB - 1), min_size=k + 1, max_size=k + 1),
    )
)


def verify(rows):
    """Each row is (draft, what the target says at each of its lines)."""
    longest = max(len(draft) for draft, _ in rows)
    padded = [draft + [VOCAB - 1] * (longest - len(draft)) for draft, _ in rows]
    verdict = verify_equal(
        torch.tensor([token for _, lines in rows for token in lines]),
        torch.tensor(padded, dtype=torch.long).view(len(rows), longest),
        torch.tensor([len(draft) for draft, _ in rows]),
    )
    return list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True))


def verify_row_by_row(draft, said):
    for place, token in enumerate(draft):
        if token != said[place]:
            return place, said[place]
    return len(draft), said[len(draft)]


@given(st.lists(row, min_size=1, max_size=6))
def test_ragged_rows_are_decided_like_each_row_alone(rows):
    assert verify(rows) == [verify_row_by_row(draft, said) for draft, said in rows]


def test_full_acceptance_gives_the_bonus_token():
    assert verify([([1, 2, 3], [1, 2, 3, 0])]) == [(3, 0)]


def test_a_wrong_first_guess_gives_the_recovered_token_alone():
    assert verify([([1, 2, 3], [2, 2, 3, 0])]) == [(0, 2)]


def test_agreement_behind_a_wrong_guess_does_not_count():
    assert verify([([1, 2, 3], [1, 0, 3, 2])]) == [(1, 0)]


def test_rows_without_drafts_get_their_next_token():
    assert verify([([], [2]), ([], [3])]) == [(0, 2), (0, 3)]


def test_padding_behind_a_short_draft_is_never_accepted():
    # The padding token is VOCAB - 1, and the line that would judge it belongs to the next row and says the same.
    assert verify([([1], [1, 3]), ([3, 3], [3, 3, 0])]) == [(1, 3), (2, 0)]
