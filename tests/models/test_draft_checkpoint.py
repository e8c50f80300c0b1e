"""Draft checkpoints: what they hold, what they borrow, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_folders import text_llama
from toy_models import make_model

from batchspec.models.draft_checkpoint import (
    is_draft_checkpoint,
    load_draft,
    make_draft,
    own_weights,
    save_draft,
)
from batchspec.models.prepacking import PrepackedLinear, can_prepack, prepacked_copy
from batchspec.models.short_head import head_ids

TOKENS = torch.arange(12).view(2, 6) * 7
IDS = torch.tensor([2, 3, 5, 40, 95])


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


def saved(folder, target, layers=(0, 1), ids=None):
    """A draft whose weights are not the target's any more, and which bfloat16 can hold."""
    draft = make_draft(target, list(layers), ids)
    with torch.no_grad():
        for weight in own_weights(draft).values():
            weight.mul_(1.25).copy_(weight.to(torch.bfloat16))
    save_draft(folder, draft, target, list(layers))
    return draft


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "mixtral"])
@pytest.mark.parametrize("ids", [None, IDS])
def test_a_draft_is_loaded_as_it_was_saved_and_borrows_the_rest(tmp_path, family, ids):
    target = make_model(family)
    before = logits(target)
    draft = saved(tmp_path, target, ids=ids)
    loaded = load_draft(tmp_path, target)
    torch.testing.assert_close(logits(loaded), logits(draft))
    assert torch.equal(logits(target), before)
    own = {weight.data_ptr() for weight in own_weights(loaded).values()}
    assert not own & {weight.data_ptr() for weight in target.parameters()}
    assert loaded.get_input_embeddings().weight is target.get_input_embeddings().weight
    if ids is None:
        assert loaded.get_output_embeddings().weight is target.get_output_embeddings().weight
    embedding = target.get_input_embeddings().weight.shape
    assert all(tensor.shape != embedding for tensor in load_file(tmp_path / "model.safetensors").values())


def test_a_short_head_gives_those_rows_of_the_whole_one(tmp_path):
    target = make_model("llama")
    saved(tmp_path / "whole", target)
    saved(tmp_path / "short", target, ids=IDS)
    whole, short = load_draft(tmp_path / "whole", target), load_draft(tmp_path / "short", target)
    torch.testing.assert_close(logits(short), logits(whole)[..., IDS])
    assert head_ids(short).tolist() == IDS.tolist()
    assert head_ids(whole) is None


@pytest.mark.skipif(not can_prepack(torch.float32), reason="this PyTorch cannot prepack weights")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_are_prepacked_when_the_target_is_and_fit_either_way(tmp_path, family):
    target = make_model(family).float()
    packed = prepacked_copy(target)
    saved(tmp_path / "plain", target, ids=IDS)
    saved(tmp_path / "packed", packed, ids=IDS)
    drafts = [load_draft(tmp_path / kind, model) for kind in ("plain", "packed") for model in (target, packed)]
    for draft in drafts:
        torch.testing.assert_close(logits(draft), logits(drafts[0]))
    assert [any(isinstance(part, PrepackedLinear) for part in draft.modules()) for draft in drafts] == [
        False,
        True,
    ] * 2


def test_the_same_target_in_another_dtype_is_the_same_target(tmp_path):
    saved(tmp_path, text_llama(seed=1).to(torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):
        assert load_draft(tmp_path, text_llama(seed=1).to(torch.bfloat16).to(dtype)).dtype == dtype


def test_another_target_is_refused_in_one_line(tmp_path):
    saved(tmp_path, text_llama(seed=1))
    with pytest.raises(ValueError, match="drafts for another target: its embedding_digest is") as error:
        load_draft(tmp_path, text_llama(seed=2))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="its num_layers is 2, this one's is 3"):
        load_draft(tmp_path, text_llama(seed=1, layers=3))
    with pytest.raises(ValueError, match="its model_type is 'llama', this one's is 'gpt2'"):
        load_draft(tmp_path, make_model("gpt2"))


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    target = text_llama(seed=1)
    saved(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file(tensors | {name: tensors[name][:4].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is \[4, 32\] and must be \[32, 32\]"):
        load_draft(tmp_path, target)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load_draft(tmp_path, target)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="cannot be read"):
        load_draft(tmp_path, target)


@pytest.mark.parametrize("ids", [[3, 3], [5, 2], [1, 258], [-1, 2], []])
def test_a_head_of_ids_that_do_not_rise_or_exist_is_refused(ids):
    with pytest.raises(ValueError, match="head_ids must be rising token ids from 0 to 257"):
        make_draft(text_llama(), [0], torch.tensor(ids, dtype=torch.int32))


def test_another_version_is_refused(tmp_path):
    saved(tmp_path, text_llama())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 1}))
    with pytest.raises(
        ValueError, match="must be of kind layers or feature and version 2, it is of kind 'layers' and version 1"
    ):
        load_draft(tmp_path, text_llama())


def test_other_folders_are_no_draft_checkpoints(tmp_path):
    assert not is_draft_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('["format"]')
    assert not is_draft_checkpoint(tmp_path)
    assert not is_draft_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert not is_draft_checkpoint(text_llama())
