"""Candidates that share the loaded target."""

import gc
import weakref

import pytest
import torch
from toy_folders import text_llama
from toy_target import make_target

from batchspec.audit.local_engines import make_llm
from batchspec.audit.session import open_candidate
from batchspec.audit.spec import parse_spec
from batchspec.models.draft_checkpoint import make_draft, save_draft


def test_candidates_share_one_prepacked_copy_unless_they_refuse_it(target):
    plain = make_llm(target, 2, {"prepack": False})
    packed = [make_llm(target, size, {}) for size in (1, 2)]
    assert plain.model is target.llm.model
    assert packed[0].model is packed[1].model is not target.llm.model


def test_the_copy_goes_with_its_target():
    target = make_target(max_tokens=1, prompts=("Once",))
    copy = weakref.ref(target.prepacked_model)
    assert copy() is not None
    del target
    gc.collect()
    assert copy() is None


@pytest.mark.parametrize(
    ("ids", "kind", "reason"),
    [
        (torch.arange(40, 80), "layers", "must have a whole head"),
        (None, "feature", "must not be of kind 'feature'"),
    ],
)
def test_transformers_is_not_given_drafts_that_only_batchspec_can_use(tmp_path, target, ids, kind, reason):
    model = text_llama(1)
    save_draft(tmp_path / "draft", make_draft(model, [0], ids, kind), model, [0])
    options = f"model={tmp_path / 'draft'},num_speculative_tokens=3"
    with pytest.raises(ValueError, match=reason):
        open_candidate(target, parse_spec(f"transformers-assisted:{options}"), is_sampled=False)
    open_candidate(target, parse_spec(f"batchspec:method=draft_model,{options}"), is_sampled=False)


def test_a_draft_of_layers_with_the_whole_head_may_assist(tmp_path, target):
    model = text_llama(1)
    save_draft(tmp_path / "draft", make_draft(model, [0]), model, [0])
    spec = parse_spec(f"transformers-assisted:model={tmp_path / 'draft'}")
    assert open_candidate(target, spec, is_sampled=False).name == spec.text
