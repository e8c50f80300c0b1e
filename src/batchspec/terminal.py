"""How names of methods and candidates fit into the columns of a terminal's tables."""

from __future__ import annotations

from collections.abc import Iterable

WIDEST_WORD = 22
"""Longer ones are folded."""


def breakable(name: str) -> str:
    """A name with spaces where a line may end.

    >>> breakable("openai:http://localhost:8000/v1,model=NAME")
    'openai: http://localhost:8000/v1, model=NAME'
    """
    return name.replace(":", ": ", 1).replace(",", ", ")


def width_of_words(texts: Iterable[str]) -> int:
    """How wide a column has to be for its longest word.

    >>> width_of_words(["draft_model, lookup=suffix", "none"])
    13
    """
    return min(WIDEST_WORD, max((len(word) for text in texts for word in text.split()), default=0))
