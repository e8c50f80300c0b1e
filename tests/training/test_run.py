"""Training on a toy target: it learns, survives a kill, and its result drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, islice

import pytest
import torch
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM, SamplingParams
from batchspec.models.draft_checkpoint import load_draft
from batchspec.models.short_head import head_ids
from batchspec.training.run import make_data, open_folder, train
from batchspec.training.settings import TrainingSettings

SETTINGS = TrainingSettings(
    layers=1,
    minutes=1.5,
    data_minutes=0.05,  # three ticks of the clock below, and as many shards
    max_prompt_tokens=24,
    max_tokens=40,
    shard_size=32,
    window=512,
    lines_per_step=1,
    learning_rate=1e-2,
    num_measurements=4,
)


def ticking():
    """A clock that goes on by a second whenever it is looked at: so many steps a minute, whatever the machine."""
    return count().__next__


@torch.no_grad()
def learnable_llama(seed: int):
    """Says next what mostly the last token decides, which one layer can learn; and runs to its budget."""
    model = text_llama(seed=seed).float()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0.2
    model.lm_head.weight[256] = 0.0
    return model


def new_llm(seed=1, **settings) -> LLM:
    return LLM(learnable_llama(seed), tokenizer=byte_tokenizer(), max_num_seqs=16, **settings)


def trained(folder, llm, settings=SETTINGS, num_steps=None, prompts=None):
    """Train, for so many steps or to the end."""
    work = open_folder(folder, llm, settings, prompts)
    data = make_data(work, llm, settings, prompts, lambda tokens: None, ticking())
    for _ in islice(train(folder, work, llm, settings, data, ticking()), num_steps):
        pass


def curve(folder):
    return [json.loads(line) for line in (folder / "training/curve.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """For the fixtures of this module, too: curves are compared number by number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(_one_thread):
    return new_llm()


@pytest.fixture(scope="module", params=["layers", "feature"])
def settings(request):
    if request.param == "feature":
        # Twice the ticks for as many shards: hidden states take time, too.
        return replace(SETTINGS, kind="feature", learning_rate=3e-3, minutes=3.0, data_minutes=0.1)
    return SETTINGS


@pytest.fixture(scope="module")
def whole(tmp_path_factory, llm, settings):
    """A training that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained(folder, llm, settings)
    return folder


def test_agreement_and_acceptance_rise_clearly(whole, settings):
    points = curve(whole)
    assert len(points) == 1 + SETTINGS.num_measurements
    assert points[-1]["minutes"] >= settings.minutes > points[-2]["minutes"]
    assert points[-1]["agreement"] > points[0]["agreement"] + 0.05
    assert points[-1]["acceptance"][0] > points[0]["acceptance"][0] + 0.1
    assert points[-1]["loss"] < points[1]["loss"]


def test_a_training_that_was_killed_twice_gives_the_same_curve_and_drafter(whole, tmp_path, llm, settings):
    trained(tmp_path, llm, settings, num_steps=30)  # some steps behind the last state are lost
    trained(tmp_path, llm, settings, num_steps=41)
    (tmp_path / "training/data/00001.safetensors").unlink()
    (tmp_path / "training/data/hidden-00000.safetensors").unlink(missing_ok=True)
    (tmp_path / "training/data/00002.safetensors").rename(
        tmp_path / "other"
    )  # a shard that is made anew is the same
    trained(tmp_path, llm, settings)
    assert curve(tmp_path) == curve(whole)
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_hidden_states_of_other_texts_are_refused(tmp_path, llm):
    settings = replace(SETTINGS, kind="feature", data_minutes=0.1)
    trained(tmp_path, llm, settings, num_steps=1)
    data = tmp_path / "training/data"
    (data / "hidden-00001.safetensors").rename(data / "hidden-00000.safetensors")
    with pytest.raises(
        ValueError, match=r"hidden-00000\.safetensors' does not hold the hidden states of these texts"
    ):
        trained(tmp_path, llm, settings, num_steps=1)


def test_the_result_drafts_and_changes_no_token(whole, llm):
    drafting = new_llm(speculative_config={"method": "draft_model", "model": whole})
    prompts = ["The sea", "Once upon", "A list: a b c"]
    params = [SamplingParams(temperature=place % 2, seed=place, max_tokens=40) for place in range(3)]
    answers = [
        [output.outputs[0].token_ids for output in one.generate(prompts, params, use_tqdm=False)]
        for one in (llm, drafting)
    ]
    assert answers[0] == answers[1]
    assert drafting.engine.stats.num_accepted_tokens > 0


def test_another_target_is_refused(whole, settings):
    with pytest.raises(ValueError, match="drafts for another target"):
        new_llm(seed=2, speculative_config={"method": "draft_model", "model": whole})
    with pytest.raises(ValueError, match="holds a training with another target; give another --out"):
        open_folder(whole, new_llm(seed=2), settings, None)


def test_other_settings_or_prompts_are_refused(whole, llm, settings):
    with pytest.raises(ValueError, match="holds a training with another seed; give another --out"):
        open_folder(whole, llm, replace(settings, seed=3), None)
    with pytest.raises(ValueError, match="holds a training with another prompts"):
        open_folder(whole, llm, settings, [[1, 2], [3]])


def test_a_short_head_of_frequent_tokens_is_trained_and_saved(tmp_path, llm):
    settings = replace(SETTINGS, head_size=24, minutes=0.3)
    trained(tmp_path, llm, settings)
    ids = head_ids(load_draft(tmp_path, llm.model))
    assert len(ids) == 24
    said = torch.cat(
        [
            text.top_ids[:, 0]
            for text in make_data(tmp_path / "training", llm, settings, None, lambda tokens: None).texts
        ]
    )
    assert torch.isin(said.long(), ids).float().mean() > 0.7  # of the 54 that it says; any 24 would have 0.44
    drafting = new_llm(speculative_config={"method": "draft_model", "model": tmp_path})
    params = SamplingParams(temperature=0.0, max_tokens=40)
    answers = [one.generate("The sea", params, use_tqdm=False)[0].outputs[0].token_ids for one in (llm, drafting)]
    assert answers[0] == answers[1]
    assert drafting.engine.stats.num_accepted_tokens > 0


def test_the_target_stays_as_it_is(tmp_path):
    llm = new_llm()
    before = {name: weight.clone() for name, weight in llm.model.state_dict().items()}
    trained(tmp_path, llm, num_steps=12)
    assert all(torch.equal(weight, before[name]) for name, weight in llm.model.state_dict().items())
    assert all(weight.grad is None for weight in llm.model.parameters())


def test_prompts_that_are_given_are_answered(tmp_path, llm):
    prompts = [[60 + place, 70, 80] for place in range(40)]
    work = open_folder(tmp_path, llm, SETTINGS, prompts)
    data = make_data(work, llm, SETTINGS, prompts, lambda tokens: None, ticking())
    texts = data.texts + data.held_out
    assert {tuple(text.token_ids[:3].tolist()) for text in texts} == set(map(tuple, prompts))
    # 96 answers to 40 prompts: greedy ones in the first round only.
    assert sum(text.is_greedy for text in texts) == 20
    held_out = {tuple(text.token_ids[:3].tolist()) for text in data.held_out}
    assert held_out.isdisjoint({tuple(text.token_ids[:3].tolist()) for text in data.texts})


def test_prompts_of_which_none_can_be_held_out_are_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="prompts must be two different ones at least"):
        open_folder(tmp_path / "out", new_llm(), SETTINGS, [[1, 2], [1, 2]])
    assert not (tmp_path / "out").exists()


def test_a_window_without_room_for_answers_is_named(tmp_path):
    prompts = [[number, *range(20)] for number in range(8)]
    with pytest.raises(ValueError, match="window must leave room for answers behind their prompts, got 8"):
        trained(tmp_path / "out", new_llm(), replace(SETTINGS, window=8), num_steps=2, prompts=prompts)
