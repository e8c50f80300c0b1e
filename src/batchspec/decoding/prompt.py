"""Log-probabilities of a prompt's tokens."""

from __future__ import annotations

from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.outputs import TokenLogprobs
from batchspec.request import Sequence
from batchspec.sampling.logprobs import log_softmax, token_logprobs


class PromptReader:
    """Reads the logits of a prompt, chunk by chunk. They answer the next token each, so the first has no entry."""

    def __init__(self, sequence: Sequence) -> None:
        self._prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        self._num_top = sequence.params.prompt_logprobs or 0
        self.entries: list[TokenLogprobs | None] = [None]

    def read(self, logits: Tensor) -> None:  # [tokens of the chunk, vocabulary]
        start = len(self.entries)
        tokens = self._prompt[start : start + logits.shape[0]]
        index = to_device(tokens, logits.device)
        self.entries += token_logprobs(log_softmax(logits), index, [self._num_top] * len(tokens))
