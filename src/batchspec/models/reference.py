"""What transformers itself gives: the target alone, in padded batches, assisted; its logits for given tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from batchspec.models.attention import own_attention
from batchspec.models.prepacking import unpacked_copy

Forced = Callable[[list[tuple[list[int], list[int]]]], list[Tensor]]
"""`forced_logits` of some model."""


def generate_alone(
    model: PreTrainedModel, prompt_token_ids: list[int], max_tokens: int, end_token_ids: Iterable[int]
) -> list[int]:
    """Output tokens of transformers' own greedy search, the end token included."""
    prompt = torch.tensor([prompt_token_ids], device=model.device)
    ends = sorted(end_token_ids)
    with own_attention(model):
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
    return output[0, prompt.shape[1] :].tolist()


def generate_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_tokens: int,
    end_token_ids: Iterable[int],
    temperature: float = 0.0,
    seed: int = 0,
    on_tokens: Callable[[], None] | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Output tokens of transformers' own `generate` over one left-padded batch, each up to its end token.

    Temperature 0 is greedy search; above, tokens are drawn from the whole distribution, with noise that `seed`
    fixes (the global random state stays as it is). `on_tokens` is called whenever there are new tokens, and
    `settings` go on to `generate`.
    """
    if on_tokens is not None:
        settings["stopping_criteria"] = StoppingCriteriaList([_that_calls(on_tokens)])
    ends = sorted(end_token_ids)
    tokens, mask = _left_padded(prompts, model.device, pad=ends[0] if ends else 0)
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        with own_attention(model):
            output = model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                **(drawing if temperature > 0 else {"do_sample": False}),
                **settings,
            )
    return [_up_to_end(row, ends) for row in output[:, tokens.shape[1] :].tolist()]


def generate_assisted(
    model: PreTrainedModel,
    prompt_token_ids: list[int],
    max_tokens: int,
    end_token_ids: Iterable[int],
    temperature: float = 0.0,
    seed: int = 0,
    assistant: PreTrainedModel | None = None,
    num_speculative_tokens: int = 10,
    on_tokens: Callable[[], None] | None = None,
) -> list[int]:
    """Output tokens of transformers' own assisted decoding of one prompt: by prompt look-up, or with a model."""
    settings: dict[str, Any] = {"prompt_lookup_num_tokens": num_speculative_tokens}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = num_speculative_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        settings = {"assistant_model": assistant}
    one = [prompt_token_ids]
    return generate_batch(model, one, max_tokens, end_token_ids, temperature, seed, on_tokens, **settings)[0]


def _that_calls(on_tokens: Callable[[], None]) -> Any:
    """A stopping criterion that never stops: what transformers asks after each of its rounds."""

    def criterion(token_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # [rows, tokens]; [rows]
        on_tokens()
        return torch.zeros(token_ids.shape[0], dtype=torch.bool, device=token_ids.device)

    return criterion


@torch.inference_mode()
def forced_logits(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Logits at every place of given outputs: rows of `(prompt, output)`, computed together in one pass.

    Several rows are left-padded, as `generate` does. Gives for each row `[len(output), vocabulary]` in float32 or
    wider; row `j` is what token `j` of the output is chosen from.
    """
    tokens, mask = _left_padded([prompt + output[:-1] for prompt, output in rows], model.device, pad=0)
    num_kept = max(len(output) for _, output in rows)
    arguments = {
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "logits_to_keep": num_kept,
        "use_cache": False,
    }
    taken = inspect.signature(model.forward).parameters
    with own_attention(model):
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            **{name: value for name, value in arguments.items() if name in taken},
        ).logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    return [logits[place, logits.shape[1] - len(output) :].to(wide) for place, (_, output) in enumerate(rows)]


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it is that precise, else a copy in float32."""
    return model if model.dtype in (torch.float32, torch.float64) else unpacked_copy(model).float()


def forget_generation_settings(model: PreTrainedModel) -> None:
    """Keep of the model's generation config the special tokens only, so that greedy search is plain argmax."""
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(own, name, None) for name in names})


def _left_padded(rows: list[list[int]], device: torch.device, pad: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask, both `[rows, longest]`."""
    width = max(map(len, rows))
    tokens = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _up_to_end(tokens: list[int], ends: list[int]) -> list[int]:
    """A row without the padding behind its end token."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens
