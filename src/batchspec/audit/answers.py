"""What goes into an engine and what comes out, whichever engine it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

NOTHING = -1
"""Stands where an output has no token because it is over."""

STOPPED = -2
"""Stands for an end token of which a server tells only that there was one. It equals every end token."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer."""

    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine gave for a job; `error` says why it gave none."""

    token_ids: list[int]
    """The end token included, or `STOPPED` if it is unknown."""
    error: str | None = None
    is_text: bool = False
    """The engine gave text, and the tokens are those that the target's tokenizer makes of it."""


Engine = Callable[[list[Job], int], Iterator[tuple[int, Answer]]]
"""Takes jobs and a batch size; gives each job's place and answer as they come. It raises nothing: what goes wrong
is an answer with an `error`."""


def failure(error: BaseException) -> Answer:
    """An answer that says what an engine raised."""
    return Answer([], error=in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """Type and message of an error, cut short.

    >>> in_one_line(RuntimeError("out of memory\\nwhile ..."))
    'RuntimeError: out of memory'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"


def same_token(first: int, second: int, ends: frozenset[int]) -> bool:
    """Equal, or one of the two is an unknown end token and the other one any."""
    if STOPPED in (first, second):
        return all(token == STOPPED or token in ends for token in (first, second))
    return first == second


def first_difference(expected: list[int], got: list[int], ends: frozenset[int]) -> int | None:
    """The first position at which two outputs differ, which may be the end of one; None if they are the same.

    >>> first_difference([5, 6, 9], [5, 6, STOPPED], frozenset([9])), first_difference([5, 6], [5], frozenset())
    (None, 1)
    """
    for position, pair in enumerate(zip(expected, got, strict=False)):
        if not same_token(*pair, ends):
            return position
    shorter = min(len(expected), len(got))
    return None if len(expected) == len(got) else shorter
