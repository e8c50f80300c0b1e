"""One output against the reference: the same, a near-tie, or a violation.

Only the first difference of a prompt is judged, since behind it the two texts are different. Let r be the
reference's token there, c the candidate's, and z the target's logits in float32 after the tokens that both share.
The *margin* is that of the two largest logits. The *shortfall* is how far the lower one of r and c is below the
largest:

    shortfall = max(z) - min(z[r], z[c])

It is what is held against the noise floor. It is never below the margin (one of r and c is not the largest), so a
near-tie needs both: two logits that are almost equal, *and* a candidate that chose one of them. A token that is
third by far is a violation, however close the first two are. So is an output that ends without an end token or
goes on behind one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.audit.answers import NOTHING, STOPPED, Answer, first_difference
from batchspec.audit.target import Target, seen_as_text
from batchspec.models.reference import Forced

OUTCOMES = ("identical", "near-tie", "violation", "error")

CONTEXT_TOKENS = 24

Logits = Callable[[list[int], list[int]], Tensor]
"""Takes a prompt and the output so far; gives the target's logits of the next token, `[vocabulary]`, precisely."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between an output and its reference."""

    position: int
    """In the output, from 0."""
    expected: int
    """The reference's token, or `NOTHING`."""
    got: int
    """The candidate's token, `NOTHING` or `STOPPED`."""
    margin: float
    """Between the two largest logits in float32."""
    shortfall: float
    """How far the lower one of both tokens is below the largest logit; infinite if one of them is `NOTHING`."""
    expected_text: str
    got_text: str
    context: str
    """The end of the text that both share."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one prompt."""

    prompt: int
    kind: str
    """One of `OUTCOMES`."""
    num_shared: int = 0
    """Tokens from the start on that equal the reference's."""
    num_compared: int = 0
    """Tokens up to and with the first difference."""
    divergence: Divergence | None = None
    error: str | None = None


def precise_logits(forced: Forced) -> Logits:
    """Logits by teacher-forcing; those asked for last are kept, as candidates often differ alike."""
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def logits(prompt: list[int], output: list[int]) -> Tensor:
        key = tuple(prompt), tuple(output)
        if key not in kept:
            if len(kept) >= 16:
                kept.pop(next(iter(kept)))
            kept[key] = forced([(prompt, [*output, 0])])[0][-1]
        return kept[key]

    return logits


def compare(target: Target, prompt: int, answer: Answer, logits: Logits, floor: float) -> Outcome:
    """Judge what a candidate gave for one prompt."""
    if answer.error is not None:
        return Outcome(prompt, "error", error=answer.error)
    reference = target.references[prompt]
    if answer.is_text:
        reference = seen_as_text(target.llm, reference, target.ends)
    position = first_difference(reference, answer.token_ids, target.ends)
    if position is None:
        return Outcome(prompt, "identical", len(reference), len(reference))
    shared = reference[:position]  # and not the answer's, which may name an end token STOPPED
    row = logits(target.prompts[prompt], shared)
    divergence = _describe(target, prompt, shared, row, _at(reference, position), _at(answer.token_ids, position))
    kind = classify(divergence.shortfall, floor)
    return Outcome(prompt, kind, position, position + 1, divergence)


def classify(shortfall: float, floor: float) -> str:
    """Both tokens are within the floor of the largest logit, or not.

    >>> classify(0.1, floor=0.2), classify(0.3, floor=0.2), classify(math.inf, floor=0.2)
    ('near-tie', 'violation', 'violation')
    """
    return "near-tie" if shortfall <= floor else "violation"


def shortfall_of(row: Tensor, expected: int, got: int, ends: frozenset[int]) -> float:
    """How far the lower one of two tokens is below the largest of the logits `[vocabulary]`."""
    return max(_below_largest(row, token, ends) for token in (expected, got))


def _below_largest(row: Tensor, token: int, ends: frozenset[int]) -> float:
    if token == STOPPED:  # the best for the candidate: it was the most probable end token
        return min((_below_largest(row, end, ends) for end in ends), default=math.inf)
    if not 0 <= token < len(row):
        return math.inf
    return float(row.max() - row[token])


def _at(tokens: list[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else NOTHING


def _describe(target: Target, prompt: int, shared: list[int], row: Tensor, expected: int, got: int) -> Divergence:
    first, second = torch.topk(row, 2).values.tolist()
    return Divergence(
        position=len(shared),
        expected=expected,
        got=got,
        margin=first - second,
        shortfall=shortfall_of(row, expected, got, target.ends),
        expected_text=_name(target, expected),
        got_text=_name(target, got),
        context=_text(target, (target.prompts[prompt] + shared)[-CONTEXT_TOKENS:]),
    )


def _name(target: Target, token: int) -> str:
    if token == NOTHING:
        return "(nothing)"
    return "(an end token)" if token == STOPPED else _text(target, [token])


def _text(target: Target, token_ids: list[int]) -> str:
    tokenizer = target.llm.tokenizer
    if tokenizer is None or any(not 0 <= token < len(tokenizer) for token in token_ids):
        return " ".join(f"#{token}" for token in token_ids)
    return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
