"""What a step costs, against counts by hand."""

import pytest
import torch
from toy_folders import text_llama
from toy_models import make_model

from batchspec.bench.roofline import Machine, Work, cost_of, measure_machine, weight_bytes
from batchspec.bench.step import StepPlan, measure_steps, open_runner
from batchspec.models.prepacking import PrepackedLinear, prepack, prepacked_copy

# text_llama: 258 tokens, width 32, 2 layers of 4 heads and 2 kv heads of size 8, mlp of 48.
LAYER = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48
HEAD = 258 * 32
NORMS = 5 * 32
PLAN = StepPlan([2, 4], num_columns=2, context=10, repeats=2, numerics="fast")


def runner_of(model, plan=PLAN):
    return open_runner(model, plan, 256)


def test_a_llama_costs_what_it_costs_by_hand():
    cost = cost_of(runner_of(text_llama().float()))
    assert cost.weight_bytes == 4 * (2 * LAYER + HEAD + NORMS), "the embedding is not read"
    assert cost.cache_bytes == 4 * 2 * 2 * 16
    assert cost.token_operations == 2 * (2 * LAYER + HEAD)
    assert cost.pair_operations == 2 * 2 * 4 * 16
    work = cost.work(num_rows=3, num_columns=2, context=10)
    assert work.bytes == cost.weight_bytes + 3 * 12 * cost.cache_bytes
    assert work.operations == 3 * (2 * cost.token_operations + (11 + 12) * cost.pair_operations)


def test_prepacked_weights_cost_the_same():
    model = text_llama().float()
    packed = prepacked_copy(model)
    assert any(isinstance(module, PrepackedLinear) for module in packed.modules())
    assert cost_of(runner_of(packed)) == cost_of(runner_of(model))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_tied_head_counts_once(is_packed):
    model = text_llama().float()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert weight_bytes(prepack(model) if is_packed else model) == 4 * (2 * LAYER + HEAD + NORMS)


def test_gpt2_layers_count_as_products_and_positions_as_embeddings():
    model = make_model("gpt2").float()
    plan = StepPlan([1], num_columns=1, context=4, repeats=1, numerics="fast")
    cost = cost_of(open_runner(model, plan, 64))
    layer = 48 * 144 + 48 * 48 + 2 * 48 * 192
    assert cost.token_operations == 2 * (2 * layer + 96 * 48)
    biases_and_norms = 2 * (144 + 48 + 192 + 48 + 4 * 48) + 2 * 48
    assert cost.weight_bytes == 4 * (2 * layer + 96 * 48 + biases_and_norms)


def test_a_mixture_of_experts_is_refused():
    model = make_model("mixtral").float()
    plan = StepPlan([1], num_columns=1, context=4, repeats=1, numerics="fast")
    with pytest.raises(ValueError, match="of a mixture of experts it reads some only"):
        cost_of(open_runner(model, plan, 64))


def test_the_floor_is_the_longer_time():
    machine = Machine(bandwidth=100.0, rate=10.0)
    assert machine.floor(Work(bytes=300, operations=10)) == 3.0
    assert machine.floor(Work(bytes=300, operations=50)) == 5.0


def test_steps_are_timed_and_held_against_the_floor():
    done = []
    machine = Machine(bandwidth=1e9, rate=1e9)
    rows = measure_steps(text_llama().float(), PLAN, 256, machine, lambda: done.append(1))
    assert [(row["num_tokens"], row["num_rows"]) for row in rows] == [(2, 1), (4, 2)]
    assert len(done) == 4
    for row in rows:
        assert row["floor"] == max(row["bytes"], row["operations"]) / 1e9
        assert row["ratio"] == row["seconds"]["median"] / row["floor"]
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]


def test_invariant_steps_can_be_timed():
    plan = StepPlan([1, 4], num_columns=1, context=10, repeats=1)
    rows = measure_steps(text_llama().float(), plan, 256, Machine(1e9, 1e9), lambda: None)
    assert [row["num_rows"] for row in rows] == [1, 4]


def test_bad_plans_are_refused():
    with pytest.raises(ValueError, match="--sizes must be multiples of --columns"):
        StepPlan([3], num_columns=2, context=10, repeats=1)
    with pytest.raises(ValueError, match="must be at most 11 together"):
        open_runner(text_llama(), PLAN, 11)


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr("batchspec.bench.roofline.COPIED_BYTES", 1 << 22)
    monkeypatch.setattr("batchspec.bench.roofline.MATRIX_SIZE", {"cpu": 128})
    machine = measure_machine(torch.device("cpu"), torch.float32)
    assert 1e8 < machine.bandwidth < 1e13
    assert 1e7 < machine.rate < 1e14
