"""How draft tokens are drawn and judged: the two methods of sampling without loss.

*coupled*: drafter and target draw with the same noise, and a draft token is accepted when it equals the
target's. The output is the target's own, token for token, as if nothing had been drafted. *rejection*: the drafter
draws with noise of its own, and the classical rule accepts or replaces its tokens. The output has the target's
distribution, and other tokens than without drafts. At temperature 0 both are greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.sampling.choice import choose, line_keys, probabilities
from batchspec.sampling.lines import Lines
from batchspec.sampling.noise import ACCEPT, DRAFT, TOKEN, draw, uniform
from batchspec.sampling.verification import Verdict, verify_by_rejection, verify_equal

Draw = Callable[[Tensor, Lines], tuple[Tensor, Tensor | None]]
"""A drafter's processed logits `[M, vocabulary]` to its tokens `[M]` and the distributions that they were drawn
from `[M, vocabulary]`, if the target's half needs them."""


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """A drafter's half and the target's half."""

    draw: Draw
    verify: Callable[[Tensor, Lines, list[int], Tensor | None], Verdict]
    """The target's processed logits `[N, vocabulary]`, number of draft tokens `[rows]`, and the distributions that
    they were drawn from `[rows, K, vocabulary]`, or None if each was certain."""


def draw_coupled(logits: Tensor, lines: Lines) -> tuple[Tensor, None]:
    return choose(logits, lines, TOKEN), None


def verify_coupled(
    logits: Tensor, lines: Lines, num_draft_tokens: list[int], draft_probs: Tensor | None
) -> Verdict:
    said = choose(logits, lines, TOKEN)
    return verify_equal(said, lines.draft_token_ids, to_device(num_draft_tokens, said.device))


def draw_independent(logits: Tensor, lines: Lines) -> tuple[Tensor, Tensor]:
    probs = probabilities(logits, lines)
    return draw(probs.log(), line_keys(lines, DRAFT)), probs


def verify_rejecting(
    logits: Tensor, lines: Lines, num_draft_tokens: list[int], draft_probs: Tensor | None
) -> Verdict:
    return verify_by_rejection(
        probabilities(logits, lines),
        lines.draft_token_ids,
        to_device(num_draft_tokens, logits.device),
        draft_probs,
        uniform(line_keys(lines, ACCEPT)),
        line_keys(lines, TOKEN),
    )


SAMPLING_METHODS = {
    "coupled": SamplingMethod(draw_coupled, verify_coupled),
    "rejection": SamplingMethod(draw_independent, verify_rejecting),
}
