"""From processed logits to tokens: the most probable one, or one drawn with the noise of its position.

Drawing is `argmax(logits / temperature + Gumbel noise)` over the tokens that the filters leave. Everything here is
computed line by line, so that a line's token does not depend on the lines beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.sampling.filters import keep_probable
from batchspec.sampling.lines import Lines
from batchspec.sampling.noise import draw, keys


def choose(logits: Tensor, lines: Lines, stream: int) -> Tensor:  # [N, vocabulary] processed; [N] int64
    """The token of each line. Uses `logits` up."""
    if not lines.sampled:
        return logits.argmax(dim=-1)
    scores, noise_keys = warp(logits, lines), line_keys(lines, stream)
    if len(lines.sampled) == len(lines.rows):
        return draw(scores, noise_keys)
    tokens, index = logits.argmax(dim=-1), to_device(lines.sampled, logits.device)
    return tokens.index_copy_(0, index, draw(scores[index], noise_keys[index]))


def warp(logits: Tensor, lines: Lines) -> Tensor:  # [N, vocabulary] twice, changed in place
    """Logits divided by their temperatures, and -inf for tokens that must not be drawn. Greedy lines are as they
    were."""
    if not lines.sampled:
        return logits
    temperatures = [[1.0 if params.is_greedy else params.temperature] for params in lines.params]
    logits /= torch.tensor(temperatures, dtype=logits.dtype).to(logits.device)
    return keep_probable(logits, lines.params)


def probabilities(logits: Tensor, lines: Lines) -> Tensor:  # [N, vocabulary] twice
    """The distribution of each line's token; all on one token for greedy lines. Uses `logits` up."""
    probs = warp(logits, lines).softmax(dim=-1)
    greedy = [line for line, params in enumerate(lines.params) if params.is_greedy]
    if greedy:
        index = to_device(greedy, logits.device)
        probs[index] = torch.zeros_like(probs[index]).scatter_(1, logits[index].argmax(dim=-1, keepdim=True), 1.0)
    return probs


def line_keys(lines: Lines, stream: int) -> Tensor:  # [N] int64
    """The noise keys of all lines."""
    places = [
        (lines.sequences[row].seed, lines.sequences[row].index, lines.position(line))
        for line, row in enumerate(lines.rows)
    ]
    return keys(places, stream, lines.device)
