import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.sampling.processors import forbid_ends

rows = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 7), st.sets(st.integers(0, 9), max_size=3)), min_size=1, max_size=5
)


@given(rows)
def test_end_tokens_are_impossible_exactly_at_the_lines_that_are_too_early(rows):
    num_lines, num_forbidden, ends = zip(*rows, strict=True)
    logits = forbid_ends(torch.zeros(sum(num_lines), 10), num_lines, num_forbidden, ends)
    wanted = [
        [-torch.inf if line < forbidden and token in tokens else 0.0 for token in range(10)]
        for count, forbidden, tokens in rows
        for line in range(count)
    ]
    assert logits.tolist() == wanted
