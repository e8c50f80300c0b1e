"""The one path on which tokens become output."""

from __future__ import annotations

from batchspec.request import Sequence


def commit(sequence: Sequence, tokens: list[int], num_draft_tokens: int) -> None:
    """Append a round's tokens (accepted draft tokens, then the next token) one by one until the request ends.

    What stands behind its end is dropped and not counted as output, so that a request ends at the same token
    with whatever speculation.
    """
    if sequence.is_finished:
        return
    num_before = sequence.num_output_tokens
    try:
        for place, token in enumerate(tokens):
            sequence.append(token, accepted=place < len(tokens) - 1)
            if sequence.is_finished:
                break
    finally:  # a token watch may raise; what was committed before is committed
        kept = sequence.accepted[num_before:]
        sequence.stats.count_round(num_draft_tokens, sum(kept), len(kept))
