"""From a speculative configuration to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchspec.config import SpeculativeConfig
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.drafter import Drafter, NoDrafter
from batchspec.drafting.ngram import NgramDrafter
from batchspec.models.capability import make_runner
from batchspec.models.loader import context_length, load_model, load_tokenizer, vocabulary_size
from batchspec.models.runner import Runner
from batchspec.stats import StageTimer

MOST_PADDING = 1024
"""Two vocabularies of one tokenizer may differ in size by padding for fast matrix products, not by more."""


@dataclass(frozen=True)
class Target:
    """What a drafter has to fit."""

    runner: Runner
    tokenizer: Any
    strategy: str
    """A draft model runs by the same strategy as its target."""
    timer: StageTimer


def build_drafter(config: SpeculativeConfig | None, target: Target) -> Drafter:
    """Make the drafter that the configuration names; without a configuration one that never drafts.

    Raises:
        ValueError: the draft model cannot be loaded, cannot run by the strategy, or has another tokenizer.
    """
    if config is None:
        return NoDrafter(target.runner.device)
    return BUILDERS[config.method](config, target)


def _build_ngram(config: SpeculativeConfig, target: Target) -> Drafter:
    return NgramDrafter(
        target.runner.num_rows, config.prompt_lookup_max, config.prompt_lookup_min, target.runner.device
    )


def _build_draft_model(config: SpeculativeConfig, target: Target) -> Drafter:
    wanted = target.runner.model
    is_loaded = not isinstance(config.model, str) and not hasattr(config.model, "__fspath__")
    try:
        draft = load_model(config.model, "auto" if is_loaded else wanted.dtype, wanted.device)
    except ValueError as error:
        raise ValueError(f"draft model: {error}") from error
    sizes = vocabulary_size(wanted), vocabulary_size(draft)
    if is_loaded or target.tokenizer is None:
        _check_same_size(*sizes)
    else:
        check_same_tokenizer(target.tokenizer.get_vocab(), load_tokenizer(config.model).get_vocab(), *sizes)
    window = min(context_length(draft) or target.runner.max_length, target.runner.max_length)
    runner = make_runner(target.strategy, draft, target.runner.num_rows, window, target.timer)
    return DraftModelDrafter(runner, min(sizes))


def check_same_tokenizer(target: dict[str, int], draft: dict[str, int], target_size: int, draft_size: int) -> None:
    """Both vocabularies must give every token that they share room for the same id; sizes may differ by padding.

    Raises:
        ValueError: a token has another id, or is missing, in the draft model's tokenizer.
    """
    for token, token_id in sorted(target.items(), key=lambda item: item[1]):
        if token_id < draft_size and draft.get(token) != token_id:
            raise ValueError(
                f"draft model must have the target's tokenizer; token {token!r} is {token_id} in the target's "
                f"and {draft.get(token, 'missing')} in the draft model's"
            )
    _check_same_size(target_size, draft_size)


def _check_same_size(target_size: int, draft_size: int) -> None:
    if abs(target_size - draft_size) > MOST_PADDING:
        raise ValueError(
            f"draft model must have the target's tokenizer; the vocabularies have {draft_size} and {target_size} "
            f"tokens, more apart than padding explains ({MOST_PADDING})"
        )


BUILDERS: dict[str, Callable[[SpeculativeConfig, Target], Drafter]] = {
    "ngram": _build_ngram,
    "draft_model": _build_draft_model,
}
