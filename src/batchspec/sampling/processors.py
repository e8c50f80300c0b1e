"""Changes to logits before a token is chosen, each for all lines of a step at once.

Every line sees the tokens before it, the draft tokens before it included, and nothing of other rows. The order is
vLLM's: the request's own functions, allowed tokens, bad words, `min_tokens`, bias, penalties.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.sampling.lines import Lines

LARGE = 1e30


def process(logits: Tensor, lines: Lines) -> Tensor:  # [N, vocabulary] twice; the result is float32 or wider
    """Apply all processors that the requests of these lines ask for. May change `logits` in place."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for processor in PROCESSORS:
        processor(logits, lines)
    return logits


def are_plain(lines: Lines) -> bool:
    """Is the token of each line simply its most probable one, as nothing changes the logits?"""
    return not lines.sampled and not any(
        params.logits_processors
        or params.allowed_ids
        or params.bad_words
        or params.logit_bias
        or params.has_penalties
        or params.min_tokens
        for params in lines.params
    )


def call_functions(logits: Tensor, lines: Lines) -> None:  # logits: [N, vocabulary], changed in place
    """`logits_processors`. Infinity, with which a token is forced, becomes a large number, to be computed with.

    Raises:
        ValueError: a function gives back something else than logits, or NaN among them.
    """
    for line, params in enumerate(lines.params):
        for function in params.logits_processors or ():
            changed = function(lines.output_before(line), logits[line])
            if not isinstance(changed, Tensor) or changed.shape != logits[line].shape:
                raise ValueError(
                    f"logits_processors must return logits of shape [{logits.shape[1]}], and {function!r} "
                    f"returned {tuple(changed.shape) if isinstance(changed, Tensor) else changed!r}"
                )
            if changed.isnan().any():
                raise ValueError(f"logits_processors must not return NaN, and {function!r} did")
            logits[line] = changed.clamp(max=LARGE)


def allow_only(logits: Tensor, lines: Lines) -> None:
    """`allowed_token_ids`: -inf for all others."""
    limited = [line for line, params in enumerate(lines.params) if params.allowed_ids]
    if limited:
        places = _pairs([params.allowed_ids for params in lines.params], logits.device)
        kept = logits[places]
        logits[to_device(limited, logits.device)] = -torch.inf
        logits[places] = kept


def forbid_bad_words(logits: Tensor, lines: Lines) -> None:
    """`bad_words`: -inf for a word's last token where its other tokens stand before it in the output."""

    def endings(line: int, words: Listed[Listed[int]]) -> list[int]:
        before = lines.output_before(line) if any(len(word) > 1 for word in words) else []
        return [word[-1] for word in words if len(word) == 1 or before[1 - len(word) :] == list(word[:-1])]

    _forbid(logits, [endings(line, params.bad_words or ()) for line, params in enumerate(lines.params)])  # type: ignore[arg-type]


def forbid_ends(logits: Tensor, lines: Lines) -> None:
    """`min_tokens`: -inf for end tokens at each position that is too early for them."""

    def ends(row: int, offset: int) -> Listed[int]:
        sequence = lines.sequences[row]
        return tuple(sequence.end_token_ids) if offset < sequence.num_tokens_before_end else ()

    _forbid(logits, [ends(row, offset) for row, offset in zip(lines.rows, lines.offsets, strict=True)])


def add_bias(logits: Tensor, lines: Lines) -> None:
    """`logit_bias`."""
    biases = [params.logit_bias or {} for params in lines.params]
    if any(biases):
        values = [value for bias in biases for value in bias.values()]
        logits[_pairs([list(bias) for bias in biases], logits.device)] += torch.tensor(
            values, dtype=logits.dtype, device=logits.device
        )


def apply_penalties(logits: Tensor, lines: Lines) -> None:
    """`repetition_penalty` (Keskar et al. 2019, section 4.1), then `frequency_penalty` and `presence_penalty`.

    Only the logits of tokens that stand before a line are touched. A token that stands there several times is
    computed as often, from the same count, and so with the same result.
    """
    chosen = [line for line, params in enumerate(lines.params) if params.has_penalties]
    if not chosen:
        return
    token_ids, is_before, is_output = _tokens_before(lines, chosen)
    index = to_device(chosen, logits.device)
    counts = torch.zeros(2, len(chosen), logits.shape[1], dtype=torch.int32, device=logits.device)
    counts[0].scatter_add_(1, token_ids, is_before.int())
    counts[1].scatter_add_(1, token_ids, (is_before & is_output).int())
    in_text, in_output = counts[0].gather(1, token_ids), counts[1].gather(1, token_ids)
    repetition, frequency, presence = (
        torch.tensor([getattr(lines.params[line], name) for line in chosen], dtype=logits.dtype)
        .to(logits.device)
        .unsqueeze(1)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    )
    selected = logits[index]
    old = selected.gather(1, token_ids)
    new = torch.where(in_text > 0, torch.where(old > 0, old / repetition, old * repetition), old)
    new = new - frequency * in_output - presence * (in_output > 0)
    logits[index] = selected.scatter_(1, token_ids, new)


PROCESSORS: tuple[Callable[[Tensor, Lines], None], ...] = (
    call_functions,
    allow_only,
    forbid_bad_words,
    forbid_ends,
    add_bias,
    apply_penalties,
)


def _tokens_before(lines: Lines, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the rows of some lines, `[lines, L + K]`; which of them stand before the line; which are output.

    Example: a prompt of 5 6 with output 7 and drafts 8 9, and the line behind the first draft token.

    >>> from batchspec.request import Sequence
    >>> from batchspec.sampling_params import SamplingParams
    >>> sequence = Sequence("a", SamplingParams(), [5, 6, 7], num_prompt_tokens=2, max_length=9)
    >>> lines = Lines([sequence], torch.tensor([[8, 9]]), rows=[0, 0, 0], offsets=[0, 1, 2])
    >>> [part.tolist() for part in _tokens_before(lines, [1])]
    [[[5, 6, 7, 8, 9]], [[True, True, True, True, False]], [[False, False, True, True, True]]]
    """
    rows = [lines.rows[line] for line in chosen]
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    texts = [lines.sequences[row].token_ids for row in places]
    longest = max(map(len, texts))
    padded = to_device([text + [0] * (longest - len(text)) for text in texts], lines.device)
    place = to_device([places[row] for row in rows], lines.device)
    index = to_device(chosen, lines.device)
    token_ids = torch.cat([padded[place], lines.draft_token_ids[lines.row_index[index]]], dim=1)
    lengths = to_device([[len(lines.sequences[row].token_ids)] for row in rows], lines.device)
    prompts = to_device([[lines.sequences[row].num_prompt_tokens] for row in rows], lines.device)
    column = torch.arange(token_ids.shape[1], device=lines.device)
    is_draft = column >= longest
    is_before = torch.where(is_draft, column - longest < lines.offset_index[index].unsqueeze(1), column < lengths)
    return token_ids, is_before, column >= prompts


def _forbid(logits: Tensor, token_ids: Listed[Listed[int]]) -> None:  # [N, vocabulary]; [N] lists
    if any(token_ids):
        logits[_pairs(token_ids, logits.device)] = -torch.inf


def _pairs(token_ids: Listed[Listed[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Each line with each of its tokens.

    >>> [part.tolist() for part in _pairs([[7, 8], [], [9]], torch.device("cpu"))]
    [[0, 0, 2], [7, 8, 9]]
    """
    lines = [line for line, tokens in enumerate(token_ids) for _ in tokens]
    index = to_device([lines, [token for tokens in token_ids for token in tokens]], device)
    return index[0], index[1]
