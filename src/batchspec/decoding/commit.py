"""The one path on which tokens become output."""

from __future__ import annotations

from batchspec.decoding.judge import Gain
from batchspec.request import Sequence


def commit(sequence: Sequence, gain: Gain, num_draft_tokens: int) -> None:
    """Append a round's tokens (accepted draft tokens, then the next token) one by one until the request ends.

    What stands behind its end is dropped and not counted as output, so that a request ends at the same token
    with whatever speculation.
    """
    if sequence.is_finished:
        return
    num_before = sequence.num_output_tokens
    try:
        for place, token in enumerate(gain.token_ids):
            logprobs = gain.logprobs[place] if gain.logprobs else None
            sequence.append(token, place < len(gain.token_ids) - 1, logprobs)
            if sequence.is_finished:
                break
    finally:  # a token watch may raise; what was committed before is committed
        kept = sequence.accepted[num_before : sequence.num_output_tokens]
        sequence.stats.count_round(num_draft_tokens, sum(kept), len(kept))
