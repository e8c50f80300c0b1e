"""Structured output: which tokens may follow, by the form that the output has to have (through xgrammar)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from batchspec.sampling.lines import Lines


class GrammarCompiler:
    """Makes grammars for one tokenizer; a form that was compiled before is remembered.

    Raises:
        ValueError: xgrammar is not installed, or cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        xgrammar = _import_xgrammar()
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(end_token_ids) or None
            )
        except Exception as error:
            raise ValueError(f"structured_outputs cannot be had with this tokenizer: {error}") from error
        self.vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(info)

    def compile(self, form: Mapping[str, Any], end_token_ids: frozenset[int]) -> Callable[[], TokenGrammar]:
        """Something that makes a grammar for each candidate of a request.

        Raises:
            ValueError: the form is not a valid schema, expression or grammar, or the request has no end token.
        """
        if not end_token_ids:
            raise ValueError(
                "structured_outputs needs an end token: ignore_eos must be False, or give stop_token_ids"
            )
        kind, value = next(iter(form.items()))
        try:
            compiled = COMPILE[kind](self._compiler, value)
        except Exception as error:
            text = re.sub(r"^\[[^]]*\] \S+: ", "", str(error).strip())  # without its place in C++
            reason = text.partition("\n")[0]
            raise ValueError(f"structured_outputs {kind} cannot be compiled: {reason}") from error
        return lambda: TokenGrammar(compiled, self.vocab_size, end_token_ids)


class TokenGrammar:
    """Where one output stands in its form.

    It follows the committed tokens by itself: whatever it was told before, each call compares with those first and
    rolls back or goes on. A committed token that the form does not allow (other parameters left no other one) is
    the end of the form: then only end tokens may follow.
    """

    def __init__(self, compiled: Any, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._matcher = _import_xgrammar().GrammarMatcher(compiled, override_stop_tokens=sorted(end_token_ids))
        self._end_token_ids = sorted(end_token_ids)
        self._vocab_size = vocab_size
        self._taken: list[int] = []
        """What the matcher has taken in."""

    def num_valid(self, output_token_ids: list[int], draft: list[int]) -> int:
        """How many draft tokens may follow the output, from the first on."""
        valid = 0
        while valid < len(draft) and self._follow(output_token_ids + draft[: valid + 1]):
            valid += 1
        return valid

    def allowed(
        self, output_token_ids: list[int], draft: list[int]
    ) -> Tensor:  # [len(draft) + 1, vocabulary] bool
        """The tokens that may follow the output, and those that may follow each draft token behind it."""
        words = _import_xgrammar().allocate_token_bitmask(len(draft) + 1, self._vocab_size)
        only_ends = []
        for place in range(len(draft) + 1):
            if self._follow(output_token_ids + draft[:place]) and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(words, place)
            else:
                only_ends.append(place)
        bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : self._vocab_size].bool()
        for place in only_ends:
            allowed[place] = False
            allowed[place, self._end_token_ids] = True
        return allowed

    def _follow(self, token_ids: list[int]) -> bool:
        """Bring the matcher to where it is behind these tokens; False if the form does not allow one of them."""
        common = 0
        for mine, wanted in zip(self._taken, token_ids, strict=False):
            if mine != wanted:
                break
            common += 1
        if common < len(self._taken):
            self._matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        for token in token_ids[common:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._taken.append(token)
        return True


def forbid_by_grammar(logits: Tensor, lines: Lines) -> None:
    """-inf for tokens that the form of a request's output does not allow, at each position of the draft block."""
    for row, sequence in enumerate(lines.sequences):
        if sequence.grammar is not None:
            own = [line for line, its_row in enumerate(lines.rows) if its_row == row]
            draft = lines.drafts[row][: len(own) - 1]
            allowed = sequence.grammar.allowed(sequence.output_token_ids, draft).to(logits.device)
            logits[own[0] : own[0] + len(own)].masked_fill_(~allowed, -torch.inf)


def _quoted(choices: list[str]) -> str:
    """A grammar whose text is one of these."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


COMPILE: dict[str, Callable[[Any, Any], Any]] = {
    # Without free whitespace, in which small models lose themselves.
    "json": lambda compiler, schema: compiler.compile_json_schema(
        schema if isinstance(schema, str) else json.dumps(schema), any_whitespace=False
    ),
    "regex": lambda compiler, pattern: compiler.compile_regex(pattern),
    "choice": lambda compiler, choices: compiler.compile_grammar(_quoted(list(choices))),
    "grammar": lambda compiler, text: compiler.compile_grammar(text),
}


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            "structured_outputs needs the package xgrammar: pip install 'batchspec[structured]'"
        ) from error
    return xgrammar
