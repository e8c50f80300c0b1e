"""Token by token to text: never half a character, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed

from transformers import PreTrainedTokenizerBase

from batchspec.sampling_params import SamplingParams

CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded along with the first output tokens, so that spaces come out as in the middle
of a text and not as at its start."""

LONGEST_WAIT = 32
"""Tokens that are decoded together at most. No character is that long: what then still is none, never will be."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes bytes to that are no character (yet)."""


class Detokenizer:
    """The text of one request.

    Tokens are decoded from `_prefix` on, a few tokens before the new one, as a token's text depends on its
    neighbours; `_shown` characters of that have been given out. An incomplete character at the end is held back.
    When none is, the window moves on: to `_read`, where the last whole character before it ended.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids = prompt[-CONTEXT_TOKENS:]
        self._prefix = 0
        self._read = len(self._token_ids)
        self._shown = len(self._decode(self._token_ids).rstrip(INCOMPLETE))
        self._num_output = 0
        self._is_cut = False
        self.text = ""

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completed, after cutting the text there."""
        self._token_ids.append(token_id)
        self._num_output += 1
        new = self._new_text()
        self.text += new
        if self._num_output <= self._params.min_tokens:
            return None
        return self._cut_at_stop(len(new)) if new else None

    def text_so_far(self) -> str:
        """The text that no later token can take back: without what may turn out to begin a stop string."""
        return self.text if self._is_cut else self.text[: len(self.text) - self._held_back()]

    def _new_text(self) -> str:
        text = self._decode(self._token_ids[self._prefix :])
        must_go_on = len(self._token_ids) - self._prefix >= LONGEST_WAIT
        complete = text if must_go_on else text.rstrip(INCOMPLETE)
        new = complete[self._shown :]
        self._shown += len(new)
        if (new and complete == text) or must_go_on:
            self._prefix, self._read = self._read, len(self._token_ids)
            self._shown = len(self._decode(self._token_ids[self._prefix :]))
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def _cut_at_stop(self, num_new: int) -> str | None:
        """Cut at the first stop string that ends within the new text."""
        found: list[tuple[int, str]] = []
        for stop in self._params.stop_strings:
            place = self.text.find(stop, max(0, len(self.text) - num_new - len(stop) + 1))
            if place >= 0:
                found.append((place, stop))
        if not found:
            return None
        place, stop = min(found, key=lambda match: match[0])
        self.text = self.text[: place + len(stop) * self._params.include_stop_str_in_output]
        self._is_cut = True
        return stop

    def _held_back(self) -> int:
        """Characters at the end of the text that begin a stop string."""
        if self._params.include_stop_str_in_output:
            return 0
        longest = 0
        for stop in self._params.stop_strings:
            for size in range(longest + 1, len(stop)):
                if self.text.endswith(stop[:size]):
                    longest = size
        return longest


def bad_word_ids(
    tokenizer: PreTrainedTokenizerBase, words: Iterable[str | Listed[int]] | None
) -> list[Listed[int]]:
    """Token ids of words that must not be said: of each as it stands, and as it is behind a space."""
    found: list[Listed[int]] = []
    for word in words or ():
        if not isinstance(word, str):
            found.append(word)
            continue
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = list(tokenizer(text, add_special_tokens=False).input_ids)
            if token_ids and token_ids not in found:
                found.append(token_ids)
    return found
