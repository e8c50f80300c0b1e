"""A target and its draft model: do they speak of the same tokens?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batchspec.models.draft_checkpoint import is_draft_checkpoint, load_draft
from batchspec.models.features import is_feature_draft
from batchspec.models.loader import load_model, load_tokenizer, vocabulary_size
from batchspec.models.prepacking import prepack
from batchspec.models.short_head import head_ids

BUNDLED = Path(__file__).parents[1] / "data" / "smollm2-135m-drafter"
"""The drafter that batchspec brings; beside it lies how it was made."""

MOST_PADDING = 1024
"""Two vocabularies of one tokenizer may differ in size by padding for fast matrix products, not by more."""


def load_draft_model(
    source: Any, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedModel:
    """A draft model on the target's device and in its dtype; one that is loaded already stays as it is. A draft
    checkpoint borrows the target's embedding and head. `source` None is the drafter that batchspec brings.

    Raises:
        ValueError: it cannot be loaded, has another tokenizer, or was made for another target.
    """
    if source is None:
        return _load_bundled(target)
    if is_draft_checkpoint(source):
        try:
            return load_draft(Path(source).expanduser(), target)
        except ValueError as error:
            raise ValueError(f"draft model: {error}") from error
    is_loaded = not isinstance(source, str) and not hasattr(source, "__fspath__")
    try:
        draft = load_model(source, "auto" if is_loaded else target.dtype, target.device)
    except ValueError as error:
        raise ValueError(f"draft model: {error}") from error
    sizes = vocabulary_size(target), vocabulary_size(draft)
    if is_loaded or tokenizer is None:
        _check_same_size(*sizes)
    else:
        check_same_tokenizer(tokenizer.get_vocab(), load_tokenizer(source).get_vocab(), *sizes)
    return draft if is_loaded else prepack(draft)


def _load_bundled(target: PreTrainedModel) -> PreTrainedModel:
    try:
        return load_draft(BUNDLED, target)
    except ValueError as error:
        raise ValueError(
            "model must be given for method draft_model: a hub id, a folder or a loaded model (the drafter that "
            "batchspec brings drafts for bundled_model() only)"
        ) from error


def check_can_assist(draft: PreTrainedModel) -> None:
    """Can transformers' assisted decoding use this draft model?

    Raises:
        ValueError: it has a short head or feeds on the target's features, which only batchspec can use.
    """
    if is_feature_draft(draft):
        raise ValueError("draft model of transformers' assisted decoding must not be of kind 'feature'")
    if (ids := head_ids(draft)) is not None:
        raise ValueError(
            "draft model of transformers' assisted decoding must have a whole head, "
            f"this one's has only {len(ids)} tokens"
        )


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
