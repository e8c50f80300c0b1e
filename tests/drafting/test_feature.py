"""Feature drafts: they see the target's hidden states of the right tokens, and change no output."""

from __future__ import annotations

import pytest
import torch
from toy_models import make_model

from batchspec import LLM, SamplingParams
from batchspec.drafting.feature import FeatureDrafter
from batchspec.models.draft_checkpoint import load_draft, make_draft, own_weights, save_draft
from batchspec.models.features import features_of, fuse, is_feature_draft
from batchspec.models.step_timing import measure_draft

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 5, 6], [9], list(range(10, 45)), [20, 21, 22, 23, 24], [11, 3]]


def saved(folder, model, ids=None):
    last = model.config.num_hidden_layers - 1
    draft = make_draft(model, [last], ids, "feature")
    with torch.no_grad():  # untrained, it takes no notice of the features
        own_weights(draft)["fuse.weight"].copy_(torch.eye(48).repeat(1, 2))
    save_draft(folder, draft, model, [last])
    return {"method": "draft_model", "model": folder}


def generate(model, config, params, max_num_seqs=3, **settings):
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=config, max_num_seqs=max_num_seqs, **settings)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return llm, [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("ids", [None, torch.arange(0, 96, 3)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_outputs_stay_the_target_s(tmp_path, family, ids):
    model = make_model(family)
    params = [
        SamplingParams(temperature=place % 2, seed=place, n=1 + place % 2, max_tokens=14) for place in range(6)
    ]
    _, wanted = generate(model, None, params)
    llm, outputs = generate(model, saved(tmp_path, model, ids), params)
    assert outputs == wanted
    assert isinstance(llm.engine.drafter, FeatureDrafter)
    assert llm.engine.stats.num_draft_tokens > 0


@torch.inference_mode()
def plain_draft(target, draft, token_ids, count):
    """The same draft without a cache, from a whole pass of the target over the committed tokens."""
    tokens = torch.tensor([token_ids])
    positions = torch.arange(len(token_ids) - 1).unsqueeze(0)
    features = features_of(target, tokens[:, :-1], positions)
    drafted = []
    for _ in range(count):
        places = torch.arange(tokens.shape[1] - 1).unsqueeze(0)
        embeds = fuse(draft, tokens[:, 1:], features)
        output = draft(inputs_embeds=embeds, position_ids=places, use_cache=False, output_hidden_states=True)
        drafted.append(int(output.logits[0, -1].argmax()))
        tokens = torch.cat([tokens, torch.tensor([[drafted[-1]]])], dim=1)
        features = torch.cat([features, output.hidden_states[-1][:, -1:]], dim=1)
    return drafted


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_each_draft_is_that_of_a_drafter_without_a_cache(tmp_path, family):
    """Through rejections, rows that end and move, candidates, and prompts longer than are caught up with."""
    model = make_model(family)
    config = saved(tmp_path, model)
    draft = load_draft(tmp_path, model)
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=config, max_num_seqs=3)
    propose, checked = llm.engine.drafter.propose, []

    def compared(batch, limits):
        given = propose(batch, limits)
        for sequence, drafted, count in zip(
            batch.values(), given.token_ids.tolist(), given.num_tokens, strict=True
        ):
            if count:
                assert drafted[:count] == plain_draft(model, draft, sequence.token_ids, count)
                checked.append(count)
        return given

    llm.engine.drafter.propose = compared
    best = {"temperature": 1.0, "top_k": 1}  # greedy, and may be asked for several times
    params = [SamplingParams(**best, n=1 + place % 2, max_tokens=6 + place) for place in range(6)]
    llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    assert len(checked) > 20


def test_it_is_saved_and_loaded_with_what_fuses_its_input(tmp_path):
    model = make_model("llama")
    draft = make_draft(model, [1], kind="feature")
    with torch.no_grad():
        own_weights(draft)["fuse.weight"].mul_(0.5)
    save_draft(tmp_path, draft, model, [1])
    loaded = load_draft(tmp_path, model)
    assert is_feature_draft(loaded)
    assert torch.equal(loaded.fuse.weight, draft.fuse.weight)


def test_padded_strategies_are_refused(tmp_path):
    model = make_model("llama")
    with pytest.raises(ValueError, match="a draft model of kind feature needs strategy packed, got eqspec"):
        generate(model, saved(tmp_path, model), None, strategy="eqspec")


def test_its_steps_are_timed_as_they_run(tmp_path):
    """Where gradients might be wanted, prepacked weights are unpacked for each product, eight times a step."""
    model = make_model("llama")
    config = {**saved(tmp_path, model), "adaptive": False}
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=config, max_num_seqs=3)
    runner, modes = llm.engine.drafter.runner, set()
    runner.model.fuse.register_forward_hook(lambda *_: modes.add(torch.is_inference_mode_enabled()))
    measure_draft(runner, 3)
    assert modes == {True}
