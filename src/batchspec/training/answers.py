"""The data: answers of the target itself, to prompts that are given or that it draws itself.

Each answer comes with the target's most probable tokens at each place, which its own steps have computed anyway:
so no pass over the text is needed later. Half of the answers are greedy, half are drawn at a temperature of 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchspec.llm import LLM
from batchspec.outputs import CompletionOutput, TokenLogprobs
from batchspec.sampling.noise import request_seed
from batchspec.sampling_params import SamplingParams
from batchspec.training.settings import TrainingSettings
from batchspec.training.shards import Text

NUM_TOP = 8
"""Most probable tokens that are kept for each place."""

TEMPERATURE = 0.8
MARK = "\u2042"
"""Stands for the user's words while the chat template around them is looked at."""

Done = Callable[[int], None]
"""Is told how many answer tokens were made since the last time."""


def make_texts(
    llm: LLM, settings: TrainingSettings, prompts: list[list[int]] | None, shard: int, done: Done
) -> list[Text]:
    """Answers to the `shard`-th part of the prompts, or to so many that the target draws. The same number gives
    the same texts.

    Raises:
        ValueError: there are no prompts and the target can draw none.
    """
    first = shard * settings.shard_size
    if prompts is None:
        chosen = draw_prompts(llm, settings, first, done)
    else:
        chosen = [prompts[(first + place) % len(prompts)] for place in range(settings.shard_size)]
    if not chosen:
        raise ValueError("--prompts must be given: what the target draws as a user's words is empty or too long")
    # From the second round over given prompts on all answers are drawn, as greedy ones would only come again.
    is_greedy = [
        place % 2 == 0 and (prompts is None or first + place < len(prompts)) for place in range(len(chosen))
    ]
    params = [
        SamplingParams(
            temperature=0.0 if greedy else TEMPERATURE,
            seed=request_seed(settings.seed, 2 * (first + place) + 1),
            max_tokens=settings.max_tokens,
            logprobs=NUM_TOP,
        )
        for place, greedy in enumerate(is_greedy)
    ]
    answers = _run(llm, chosen, params, done)
    return [
        _text(prompt, answer, greedy) for prompt, answer, greedy in zip(chosen, answers, is_greedy, strict=True)
    ]


def draw_prompts(llm: LLM, settings: TrainingSettings, first: int, done: Done) -> list[list[int]]:
    """User turns that the target itself says at temperature 1, in its chat template; without one, the beginnings
    of texts."""
    opening = opening_of_a_turn(llm)
    room = max(1, settings.max_prompt_tokens - len(opening))
    params = [
        SamplingParams(
            temperature=1.0,
            seed=request_seed(settings.seed, 2 * (first + place)),
            max_tokens=room,
        )
        for place in range(settings.shard_size)
    ]
    turns = _run(llm, [opening] * settings.shard_size, params, done)
    if not _has_template(llm):
        return [opening + turn.token_ids for turn in turns]
    tokenizer: Any = llm.tokenizer
    texts = [str(tokenizer.decode(turn.token_ids, skip_special_tokens=True)).strip() for turn in turns]
    rendered = [llm.render_chat([{"role": "user", "content": text}])["prompt_token_ids"] for text in texts if text]
    return [prompt for prompt in rendered if len(prompt) < llm.engine.config.max_model_len]


def opening_of_a_turn(llm: LLM) -> list[int]:
    """The tokens that stand before the user's words in the chat template; without one, the BOS or an end token.

    Raises:
        ValueError: there is none of them.
    """
    if _has_template(llm):
        rendered = str(llm.render_chat([{"role": "user", "content": MARK}])["prompt"])
        tokenizer: Any = llm.tokenizer
        opening = list(tokenizer(rendered.split(MARK)[0], add_special_tokens=False).input_ids)
        if opening:
            return opening
    intake = llm.engine.intake
    starts = [token for token in (intake.bos_token_id, *sorted(intake.eos_token_ids)) if token is not None]
    if not starts:
        raise ValueError(
            "--prompts must be given: the target has no chat template and no token to start a text from"
        )
    return starts[:1]


def _has_template(llm: LLM) -> bool:
    return llm.tokenizer is not None and bool(llm.tokenizer.chat_template)


def _run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], done: Done) -> list[CompletionOutput]:
    """Token ids in, token ids out: nothing here needs text, which would take longer than a step."""
    for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(place), prompt, param)
    answers: dict[int, CompletionOutput] = {}
    try:
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                if output.finished:
                    answers[int(output.request_id)] = output.outputs[0]
                    done(len(output.outputs[0].token_ids))
    finally:
        llm.engine.abort_all_requests()
    return [answers[place] for place in range(len(prompts))]


def _text(prompt: list[int], answer: CompletionOutput, is_greedy: bool) -> Text:
    tops = [_most_probable(entry) for entry in answer.logprobs or []]
    return Text(
        torch.tensor(prompt + answer.token_ids, dtype=torch.int32),
        len(prompt),
        torch.tensor([[token for token, _ in top] for top in tops], dtype=torch.int32),
        torch.tensor([[logprob for _, logprob in top] for top in tops], dtype=torch.float16),
        is_greedy,
    )


def _most_probable(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The token that stands at the place comes first in the entry, and is left out if it is none of the best.

    >>> from batchspec.outputs import Logprob
    >>> entry = {7: Logprob(-5.0, rank=9)} | {token: Logprob(-1.0 - token, rank=1 + token) for token in range(8)}
    >>> [token for token, _ in _most_probable(entry)]
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:NUM_TOP]
    return [(token, one.logprob) for token, one in best]
