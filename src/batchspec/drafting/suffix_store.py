"""Earlier outputs of an engine, in a bounded memory, and where a row's text stands in them."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.drafting.suffix_automaton import ROOT, SEPARATOR, DraftedToken, SuffixAutomaton

NUM_SEGMENTS = 8
"""Parts of a full memory, of which the one that was of no use for longest makes room. More parts keep more of
what is of use; each costs a row one more step per token."""

CATCH_UP = 32
"""Last tokens of a row that are read anew in a segment that has grown; also the longest match that is sure to be
found in full."""


@dataclass(slots=True)
class Cursor:
    """Where a row's text stands in a segment: its longest suffix that occurs there."""

    segment: SuffixAutomaton
    num_read: int
    """Tokens of the row's text that were read."""
    num_known: int
    """Tokens of the segment when it was read last."""
    state: int = ROOT
    length: int = 0

    def follow(self, token_ids: list[int]) -> None:
        """Read the tokens that the row's text has got since the last call.

        In a segment that has grown, states have been split, and suffixes that were looked for in vain may occur by
        now: the last tokens are read anew. So the match is the longest, or of at least `CATCH_UP` tokens.
        """
        if self.num_known != self.segment.num_tokens:
            self.num_known = self.segment.num_tokens
            self.num_read = max(0, len(token_ids) - CATCH_UP)
            self.state, self.length = ROOT, 0
        for token_id in token_ids[self.num_read :]:
            self.state, self.length = self.segment.advance(self.state, self.length, token_id)
        self.num_read = len(token_ids)


class SuffixStore:
    """The last outputs, in a bounded number of automata (`segments`), those that were used last coming last.

    An output that does not fit in what is left of a segment goes on in a new one; when there are too many, the
    segment goes that for longest neither got an output nor gave a draft. 100,000 tokens of text take 11 to 14 MB,
    and never more than about 30 MB (tracemalloc).

    >>> store = SuffixStore(max_tokens=8, num_segments=2)
    >>> store.add([1, 2, 3])
    >>> store.add([4, 5])
    >>> store.num_tokens  # with a separator behind each output
    7
    >>> [cursor] = store.follow([], [9, 1, 2])[1:]  # the segment that was used last comes first
    >>> cursor.length, [drafted.token_id for drafted in store.walk(cursor, limit=4)]
    (2, [3])

    Raises:
        ValueError: `max_tokens` leaves no room for a token and a separator in each segment.
    """

    def __init__(self, max_tokens: int = 100_000, num_segments: int = NUM_SEGMENTS) -> None:
        if max_tokens < 2 * num_segments:
            raise ValueError(
                f"max_tokens must be at least 2 for each of {num_segments} segments, got {max_tokens}"
            )
        self.num_segments = num_segments
        self.segment_size = max_tokens // num_segments
        self.segments: list[SuffixAutomaton] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, separators included."""
        return sum(segment.num_tokens for segment in self.segments)

    def add(self, token_ids: list[int]) -> None:
        """Keep an output.

        While a segment grows it is out of the list: if that is cut off (Ctrl-C), it is lost as a whole, and no
        half-made one stays.
        """
        while token_ids:
            segment = self._take_one_with_room()
            room = self.segment_size - segment.num_tokens - 1  # the last place is for a separator
            segment.extend(token_ids[:room])
            segment.append(SEPARATOR)
            self.segments.append(segment)
            token_ids = token_ids[room:]

    def follow(self, cursors: list[Cursor], token_ids: list[int]) -> list[Cursor]:
        """The places of a row's text, one for each segment, those that were used last coming first.

        `cursors` are those of the row's last call, and `token_ids` the text of that call with tokens added.
        """
        known = {cursor.segment: cursor for cursor in cursors}
        start = max(0, len(token_ids) - CATCH_UP)
        cursors = [
            known.get(segment) or Cursor(segment, start, segment.num_tokens) for segment in reversed(self.segments)
        ]
        for cursor in cursors:
            cursor.follow(token_ids)
        return cursors

    def walk(self, cursor: Cursor, limit: int) -> list[DraftedToken]:
        """At most `limit` tokens that may follow the row's text; if there are any, the segment was of use."""
        drafted = cursor.segment.walk(cursor.state, cursor.length, limit)
        if drafted:
            self.segments.remove(cursor.segment)
            self.segments.append(cursor.segment)
        return drafted

    def _take_one_with_room(self) -> SuffixAutomaton:
        for place, segment in enumerate(self.segments):
            if segment.num_tokens + 2 <= self.segment_size:
                return self.segments.pop(place)
        if len(self.segments) == self.num_segments:
            del self.segments[0]
        return SuffixAutomaton()
