"""The target alone: what transformers gives for one prompt."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from batchspec.models.attention import own_attention


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
