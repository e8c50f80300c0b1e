"""Which runs of tokens a growing text holds, how often, and what followed them: an online suffix automaton."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = 0
"""The state of the empty run, where every search begins."""

SEPARATOR = -1
"""Stands between texts that share an automaton. It matches no token, and is never given as a follower."""

COUNTED_LINKS = 32
"""Suffixes of the text, longest first, whose occurrence an appended token counts: as many as most texts have
states for, and a bound on the work where a text has many ("aaaa..." has one for each of its lengths)."""

_NO_TOKEN = -2
_NO_STATE = -1


class Follower(NamedTuple):
    """What followed a state's runs most often."""

    token_id: int
    state: int
    share: float
    """Its occurrences among those of all followers, above 0 and at most 1."""


class DraftedToken(NamedTuple):
    """A draft token and the evidence for it."""

    token_id: int
    match_length: int
    """Tokens before it that a run of the text agrees with, if the draft tokens before it are right."""
    share: float
    """How often it followed that run, among all that did."""


class SuffixAutomaton:
    """All runs of tokens of a text, in at most two states per token. Appending a token takes constant time,
    averaged over the text.

    A state stands for the runs that end at the same places: its longest run, of `length` tokens, and the suffixes
    of it that are longer than the longest run of its suffix link. Almost all states have one follower only, which
    flat arrays hold; the others have a dictionary for the rest. 105 to 135 bytes per token on text, at most
    about 290 (tracemalloc).

    >>> automaton = SuffixAutomaton()
    >>> automaton.extend([1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1, 2])
    >>> state, length = automaton.repeated_suffix()  # "1 2" stood there before, "9 1 2" did not
    >>> length, automaton.followers(state)
    (2, {3: 2, 4: 1})
    >>> [token_id for token_id, _, _ in automaton.walk(state, length, limit=3)]
    [3, 9, 1]
    >>> [round(drafted.share, 2) for drafted in automaton.walk(state, length, limit=3)]
    [0.67, 0.5, 1.0]
    """

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [_NO_STATE])
        self._count = array("i", [0])  # occurrences, as far as COUNTED_LINKS saw them
        self._newest = array("i", [0])  # tokens up to the end of the newest occurrence that was counted
        self._token = array("i", [_NO_TOKEN])  # the first follower to come, and its state
        self._target = array("i", [_NO_STATE])
        self._others: dict[int, dict[int, int]] = {}  # further followers of states that have several
        self._last = ROOT

    @property
    def num_tokens(self) -> int:
        """Tokens of the text so far."""
        return self._length[self._last]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Append a token, of at least 0, or `SEPARATOR`."""
        link, token, target, others = self._link, self._token, self._target, self._others
        state = self._last
        new = self._add_state(self._length[state] + 1)
        while state != _NO_STATE:  # from the whole text to shorter and shorter suffixes of it
            if token[state] == token_id:
                link[new] = self._suffix_state(state, target[state], token_id)
                break
            if token[state] == _NO_TOKEN:
                token[state], target[state] = token_id, new
            elif (more := others.get(state)) is None:
                others[state] = {token_id: new}
            elif token_id in more:
                link[new] = self._suffix_state(state, more[token_id], token_id)
                break
            else:
                more[token_id] = new
            state = link[state]
        self._count_suffixes(new)
        self._last = new

    def repeated_suffix(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred before (it may overlap itself): its state and length."""
        state = max(ROOT, self._link[self._last])
        return state, self._length[state]

    def followers(self, state: int) -> dict[int, int]:
        """Tokens that followed the state's runs, and how often."""
        return {token_id: self._count[target] for token_id, target in self._edges(state) if token_id != SEPARATOR}

    def advance(self, state: int, length: int, token_id: int) -> tuple[int, int]:
        """Read one token of another text: from the longest suffix of that text which occurs in this one (`length`
        tokens, one of the runs of `state`) to the next such suffix. `(ROOT, 0)` if there is none. Places are good
        until a token is appended.

        A text read token by token takes constant time per token, averaged over the text.

        >>> automaton = SuffixAutomaton()
        >>> automaton.extend([1, 2, 3, 4])
        >>> places = [(ROOT, 0)]
        >>> for token_id in [2, 3, 9, 3, 4]:
        ...     places.append(automaton.advance(*places[-1], token_id))
        >>> [length for _, length in places]
        [0, 1, 2, 0, 1, 2]
        """
        token, others = self._token, self._others
        while True:
            if token[state] == token_id:
                return self._target[state], length + 1
            if (more := others.get(state)) is not None and token_id in more:
                return more[token_id], length + 1
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            length = self._length[state]

    def walk(self, state: int, length: int, limit: int) -> list[DraftedToken]:
        """At most `limit` tokens that may follow a run of `length` tokens (one of `state`): at each step the most
        frequent follower, of equally frequent ones the newest.

        At the end of the text it goes on with what followed the repeated suffix, as a copy that runs on into
        itself does.

        >>> automaton = SuffixAutomaton()
        >>> automaton.extend([1, 2, 1, 2, 1])
        >>> [drafted.token_id for drafted in automaton.walk(*automaton.repeated_suffix(), limit=5)]
        [2, 1, 2, 1, 2]
        """
        drafted: list[DraftedToken] = []
        while len(drafted) < limit:
            if state == self._last:
                state = self.repeated_suffix()[0]
            follower = self.best_follower(state)
            if follower is None:
                break
            drafted.append(DraftedToken(follower.token_id, length + len(drafted), follower.share))
            state = follower.state
        return drafted

    def best_follower(self, state: int) -> Follower | None:
        """The most frequent follower, of equally frequent ones the newest; None if only the end of a text
        followed."""
        if state not in self._others:
            token_id = self._token[state]
            return None if token_id < 0 else Follower(token_id, self._target[state], 1.0)
        count, newest = self._count, self._newest
        edges = [(token_id, target) for token_id, target in self._edges(state) if token_id != SEPARATOR]
        token_id, best = max(edges, key=lambda edge: (count[edge[1]], newest[edge[1]]))
        return Follower(token_id, best, count[best] / sum(count[target] for _, target in edges))

    def _edges(self, state: int) -> Iterator[tuple[int, int]]:
        if self._token[state] != _NO_TOKEN:
            yield self._token[state], self._target[state]
        if state in self._others:
            yield from self._others[state].items()

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._count.append(0)
        self._newest.append(0)
        self._token.append(_NO_TOKEN)
        self._target.append(_NO_STATE)
        return len(self._length) - 1

    def _suffix_state(self, state: int, target: int, token_id: int) -> int:
        """The state of `state`'s longest run with `token_id` behind it, which leads to `target`.

        If `target` has longer runs too, which do not end here, the others move to a state of their own: a copy,
        to which all shorter suffixes now lead.
        """
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        copy = self._add_state(length)
        for values in (self._link, self._count, self._newest, self._token, self._target):
            values[copy] = values[target]
        if target in self._others:
            self._others[copy] = self._others[target].copy()
        while state != _NO_STATE:
            if self._token[state] == token_id and self._target[state] == target:
                self._target[state] = copy
            elif self._others.get(state, {}).get(token_id) == target:
                self._others[state][token_id] = copy
            else:
                break
            state = self._link[state]
        self._link[target] = copy
        return copy

    def _count_suffixes(self, state: int) -> None:
        """One more occurrence of the whole text and of its suffixes, down to the empty one or the bound."""
        count, newest, link = self._count, self._newest, self._link
        num_tokens = self._length[state]
        for _ in range(COUNTED_LINKS):
            count[state] += 1
            newest[state] = num_tokens
            state = link[state]
            if state <= ROOT:
                break
