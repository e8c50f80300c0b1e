from pathlib import Path

import pytest
import torch
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM
from batchspec.bench.engines import answer_by_engine, make_llm, open_method, share_models
from batchspec.bench.methods import parse_methods
from batchspec.bench.workload import Workload
from batchspec.models.draft_checkpoint import make_draft, save_draft
from batchspec.models.prepacking import PrepackedLinear


def save(folder: Path, ids=None, kind="layers") -> Path:
    model = text_llama()
    save_draft(folder, make_draft(model, [0], ids, kind), model, [0])
    return folder


@pytest.mark.parametrize(
    ("ids", "kind", "reason"),
    [
        (torch.arange(40, 80), "layers", "must have a whole head"),
        (None, "feature", "must not be of kind 'feature'"),
    ],
)
def test_transformers_is_not_given_drafts_that_only_batchspec_can_use(tmp_path, ids, kind, reason):
    methods = parse_methods(["draft_model,transformers-assisted"], str(save(tmp_path / "draft", ids, kind)))
    models = share_models(LLM(text_llama(), tokenizer=byte_tokenizer()), methods)
    ours, assisted = methods
    open_method(models, ours, 1)
    with pytest.raises(ValueError, match=reason):
        open_method(models, assisted, 1)


def test_weights_are_as_each_method_wants_them():
    methods = parse_methods(["none,none,prepack=false"])
    target = LLM(text_llama().float(), tokenizer=byte_tokenizer())
    models = share_models(target, methods)
    packed, plain = (make_llm(models, method, batch_size=1).model for method in methods)
    assert plain is target.model
    assert not any(isinstance(layer, PrepackedLinear) for layer in plain.modules())
    assert any(isinstance(layer, PrepackedLinear) for layer in packed.modules())
    assert share_models(target, methods[:1]).ours is target.model  # in place: nobody else wants it


def test_a_draft_of_layers_with_the_whole_head_may_assist(tmp_path):
    methods = parse_methods(["transformers-assisted"], str(save(tmp_path / "draft")))
    models = share_models(LLM(text_llama(), tokenizer=byte_tokenizer()), methods)
    assert callable(open_method(models, methods[0], 1))


@pytest.mark.parametrize(
    ("method", "num_known"), [("none", 0), ("ngram,adaptive=false", 0), ("suffix,adaptive=true", 1)]
)
def test_an_answer_comes_with_what_steps_were_held_to_cost(method, num_known):
    models = share_models(LLM(text_llama(), tokenizer=byte_tokenizer(), max_num_seqs=2), [])
    (parsed,) = parse_methods([method])
    engine = make_llm(models, parsed, 2).engine
    outcome = answer_by_engine(engine, Workload([[1, 2, 3, 1, 2, 3]], [""], max_tokens=8))
    assert len(outcome.step_costs) == num_known
    for costs in outcome.step_costs:
        assert costs == engine.drafter.budget.target_costs
        assert costs is not engine.drafter.budget.target_costs  # which goes on being corrected
