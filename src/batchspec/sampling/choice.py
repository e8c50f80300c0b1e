"""From processed logits to tokens: the most probable one, or one drawn with the noise of its position.

Drawing is `argmax(logits / temperature + Gumbel noise)` over the tokens that the filters leave. Everything here is
computed line by line, so that a line's token does not depend on the lines beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.sampling.filters import has_filter, keep_probable
from batchspec.sampling.lines import Lines
from batchspec.sampling.noise import gumbel, gumbel_table, keys


def choose(logits: Tensor, lines: Lines, stream: int) -> Tensor:  # [N, vocabulary] processed; [N] int64
    """The token of each line."""
    if not lines.sampled:
        return logits.argmax(dim=-1)
    scores = warp(logits, lines)
    noise_keys = line_keys(lines, stream)
    is_cut = [has_filter(params) for params in lines.params]
    open_lines = [line for line in lines.sampled if not is_cut[line]]
    if open_lines:
        index = to_device(open_lines, logits.device)
        scores[index] += gumbel_table(noise_keys[index], logits.shape[1])
    if any(is_cut):
        index = to_device([line for line, cut in enumerate(is_cut) if cut], logits.device)
        places, tokens = (scores[index] > -torch.inf).nonzero(as_tuple=True)
        scores[index[places], tokens] += gumbel(noise_keys[index[places]], tokens)
    return scores.argmax(dim=-1)


def warp(logits: Tensor, lines: Lines) -> Tensor:  # [N, vocabulary] twice
    """Logits divided by their temperatures, and -inf for tokens that must not be drawn. Greedy lines are as they
    were."""
    if not lines.sampled:
        return logits
    temperatures = [[1.0 if params.is_greedy else params.temperature] for params in lines.params]
    scaled = logits / torch.tensor(temperatures).to(logits)
    return keep_probable(scaled, lines.params)


def probabilities(logits: Tensor, lines: Lines) -> Tensor:  # [N, vocabulary] twice
    """The distribution of each line's token; all on one token for greedy lines."""
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
