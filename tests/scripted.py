"""A target without weights: the cache holds token ids, and the next token is a function of the tokens before it.

It runs the real layouts: a wrong slot, a stale token, or a row that was not moved changes what it says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from batchspec.config import EngineConfig
from batchspec.drafting.drafter import Draft, NoDrafter
from batchspec.engine import Engine
from batchspec.sampling_params import SamplingParams

VOCAB = 12
EOS = 0
Script = Callable[[tuple[int, ...]], int]


def hashed_script(context: tuple[int, ...], seed: int = 0, depth: int = 3) -> int:
    """A next token from the last few tokens and the length: looks random, repeats itself a little."""
    key = repr((seed, context[-depth:], len(context) % 7)).encode()
    return hashlib.sha256(key).digest()[0] % VOCAB


class ScriptedRunner:
    """Stands in for a runner: same methods, but keys and values are the token ids themselves."""

    def __init__(self, script: Script, num_rows: int, max_length: int) -> None:
        self.script = script
        self.device = torch.device("cpu")
        self.num_rows = num_rows
        self.max_length = max_length
        self.slots = [[-1] * max_length for _ in range(num_rows)]
        self.num_forwards = 0
        self.tokens_per_forward: list[int] = []
        self.num_prefilled = 0

    def forward(self, step, token_ids, keep=None):
        self.num_forwards += 1
        self.tokens_per_forward.append(step.num_tokens)
        rows, slots = step.cache_rows.tolist(), step.slots.tolist()
        for row, slot, token in zip(rows, slots, token_ids.tolist(), strict=True):
            self.slots[row][slot] = token
        lines = range(step.num_tokens) if keep is None else keep.tolist()
        said = [self.script(tuple(self.slots[rows[line]][: slots[line] + 1])) for line in lines]
        return torch.nn.functional.one_hot(torch.tensor(said, dtype=torch.long), VOCAB).float()

    def prefill(self, row, token_ids, start=0, read=None):
        self.num_prefilled += len(token_ids)
        self.slots[row][start : start + len(token_ids)] = token_ids

    def copy_row(self, source, target, length):
        self.slots[target] = self.slots[source][:length] + [-1] * (self.max_length - length)

    def release_row(self, row, last, last_length):
        if row != last:
            self.slots[row][:last_length] = self.slots[last][:last_length]
        self.slots[last] = [-1] * self.max_length  # whoever still reads the old row shall notice


class ScriptedDrafter:
    """Drafts what the target will say, wrong wherever `is_right(position)` says so."""

    def __init__(self, script: Script, is_right: Callable[[int], bool]) -> None:
        self.script = script
        self.is_right = is_right

    def propose(self, batch, limits):
        drafts = [self._draft(row, limit) for row, limit in zip(batch.values(), limits, strict=True)]
        return Draft.from_lists(drafts, torch.device("cpu"))

    def release_row(self, row, last):
        pass

    def _draft(self, row, limit):
        context = list(row.token_ids)
        for _ in range(limit):
            token = self.script(tuple(context))
            context.append(token if self.is_right(len(context)) else (token + 1) % VOCAB)
        return context[len(row.token_ids) :]


def make_engine(
    script: Script,
    drafter=None,
    *,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    num_speculative_tokens: int = 4,
    eos: frozenset[int] = frozenset({EOS}),
    **settings,
) -> Engine:
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=num_speculative_tokens if drafter else 0,
        **settings,
    )
    return Engine(
        ScriptedRunner(script, config.num_rows, max_model_len),
        drafter or NoDrafter(torch.device("cpu")),
        config,
        vocab_size=VOCAB,
        eos_token_ids=eos,
    )


def expected(
    script: Script,
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int = 64,
    eos: frozenset[int] = frozenset({EOS}),
) -> tuple[list[int], str, int | None]:
    """Token ids, finish reason and stop reason by the plainest loop there is."""
    tokens, output = list(prompt), []
    ends = set(params.stop_ids) | (set() if params.ignore_eos else eos)
    while True:
        token = script(tuple(tokens))
        if token in ends and len(output) < params.min_tokens:
            # argmax of a one-hot line whose end tokens are -inf: the first token that is none
            token = next(candidate for candidate in range(VOCAB) if candidate not in ends)
        tokens.append(token)
        output.append(token)
        if token in ends:
            return output, "stop", None if token in eos and not params.ignore_eos else token
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None


def run_to_end(engine: Engine) -> dict[str, object]:
    """Step until nothing is left; the last snapshot of each request."""
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished, "an output was given twice"
                finished[output.request_id] = output
    return finished
