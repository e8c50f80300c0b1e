"""From what was asked to sequences: every check of a request that needs no text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import count

from batchspec.request import Grammar, Sequence, TokenWatch
from batchspec.sampling.noise import request_seed
from batchspec.sampling_params import SamplingParams


@dataclass
class Intake:
    """What an engine can run."""

    vocab_size: int
    max_model_len: int
    seed: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        self._serials = count()

    def make_sequence(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        watch: TokenWatch | None = None,
        serial: int | None = None,
        make_grammar: Callable[[], Grammar] | None = None,
    ) -> Sequence:
        """The first candidate of a request; `siblings` holds all.

        `serial` numbers requests without a seed, by default as they come.

        Raises:
            ValueError: the request cannot be run; says why.
        """
        token_ids = list(prompt_token_ids)
        if not token_ids:
            if self.bos_token_id is None:
                raise ValueError("prompt must not be empty: this model has no BOS token to start from")
            token_ids = [self.bos_token_id]
        self._check_ids("prompt", token_ids)
        self._check_params(params)
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"prompt must have at most {self.max_model_len - 1} tokens (max_model_len less one for the "
                f"output), got {len(token_ids)}"
            )
        if watch is not None and params.n > 1:
            raise ValueError("watch goes with n = 1; with more candidates, set it for each of `siblings`")
        if params.structured_outputs is not None and make_grammar is None:
            raise ValueError("structured_outputs needs a tokenizer; make the request through LLM")
        serial = next(self._serials) if serial is None else serial
        siblings: list[Sequence] = []
        for _ in range(params.n):
            Sequence(
                request_id=request_id,
                params=params,
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                max_length=len(token_ids) + min(room, params.max_tokens or room),
                eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
                watch=watch,
                seed=request_seed(self.seed, serial) if params.seed is None else params.seed,
                siblings=siblings,
                grammar=make_grammar() if make_grammar else None,
            )
        return siblings[0]

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_ids)
        self._check_ids("allowed_token_ids", params.allowed_ids)
        ends = self.eos_token_ids.union(params.stop_ids)
        if params.min_tokens and params.allowed_ids and ends.issuperset(params.allowed_ids):
            raise ValueError("allowed_token_ids must hold more than end tokens, as min_tokens forbids those")
        if params.structured_outputs is not None and params.allowed_ids and ends.isdisjoint(params.allowed_ids):
            raise ValueError("allowed_token_ids must hold an end token with structured_outputs, to end its form")
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        for word in params.bad_words or ():
            if isinstance(word, str):
                raise ValueError(
                    "bad_words must be token id lists here, as there is no tokenizer to read words with"
                )
            self._check_ids("bad_words", word)

    def _check_ids(self, name: str, token_ids: Tokens[int]) -> None:
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{name} must hold token ids from 0 to {self.vocab_size - 1} (the vocabulary), got {token!r}"
                )
