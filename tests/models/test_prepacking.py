"""Prepacked models compute what plain ones do, and stay whole models."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from toy_folders import save_text_llama, text_llama
from toy_models import make_model
from transformers import AutoModelForCausalLM

from batchspec import LLM, SamplingParams
from batchspec.models import prepacking, products
from batchspec.models.prepacking import (
    PrepackedLinear,
    can_prepack,
    is_packable,
    prepack,
    prepacked_copy,
    unpacked_copy,
)

pytestmark = pytest.mark.skipif(not can_prepack(torch.float32), reason="this PyTorch cannot prepack weights")
TOKENS = torch.arange(12).view(2, 6)


def num_prepacked(model: nn.Module) -> int:
    return sum(isinstance(layer, PrepackedLinear) for layer in model.modules())


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "mixtral", "gemma2"])
def test_prepacked_models_compute_what_plain_ones_do(family):
    model = make_model(family).float()
    wanted = logits(model)
    assert num_prepacked(prepack(model)) >= 8
    torch.testing.assert_close(logits(model), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_bias_equals_the_plain_one(dtype):
    layer = nn.Linear(96, 40).to(dtype)
    inputs = torch.randn(3, 5, 96).to(dtype)
    packed = PrepackedLinear(layer.weight, layer.bias)
    torch.testing.assert_close(packed(inputs), layer(inputs))
    assert torch.equal(packed.weight, layer.weight)
    assert packed(inputs[:0]).shape == (0, 5, 40)


def test_a_copy_leaves_the_model_as_it_is_and_shares_what_is_not_packed():
    model = text_llama().float()
    copy = prepacked_copy(model)
    assert num_prepacked(model) == 0 < num_prepacked(copy)
    assert copy.get_input_embeddings().weight is model.get_input_embeddings().weight
    torch.testing.assert_close(logits(copy), logits(model))


def test_prepacked_models_can_be_copied_and_unpacked():
    model = text_llama().float()
    packed = prepacked_copy(model)
    assert torch.equal(logits(deepcopy(packed)), logits(packed))
    plain = unpacked_copy(packed)
    assert num_prepacked(plain) == 0
    assert torch.equal(logits(plain), logits(model))
    assert {name for name, _ in plain.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_prepacked_models_save_what_they_were_loaded_from(tmp_path):
    folder = save_text_llama(tmp_path / "before")
    packed = prepack(AutoModelForCausalLM.from_pretrained(folder))
    packed.save_pretrained(tmp_path / "after")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    wanted = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(mine, other) for mine, other in zip(saved.parameters(), wanted.parameters(), strict=True)
    )


def test_other_weights_and_dtypes_are_refused_instead_of_ignored():
    packed = prepacked_copy(text_llama().float())
    with pytest.raises(RuntimeError, match="prepack=False"):
        packed.load_state_dict(text_llama(seed=3).state_dict())
    with pytest.raises(RuntimeError, match="prepack=False"):
        packed.to(torch.float64)
    assert packed.to("cpu") is packed


def test_layers_that_are_more_than_a_product_are_left_alone():
    class Quantised(nn.Linear):
        pass

    hooked, replaced = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda inputs: inputs
    layers = [Quantised(8, 8), hooked, replaced, nn.Linear(8, 8, device="meta"), nn.Linear(8, 8).double()]
    assert not any(map(is_packable, layers))
    assert is_packable(nn.Linear(8, 8))


def test_an_llm_prepacks_what_it_loads_and_nothing_else(tmp_path):
    folder = save_text_llama(tmp_path)
    assert num_prepacked(LLM(folder, dtype="float32").model) > 0
    assert num_prepacked(LLM(folder, dtype="float32", prepack=False).model) == 0
    assert num_prepacked(LLM(text_llama().float(), skip_tokenizer_init=True).model) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariance_holds_on_prepacked_models(tmp_path, dtype):
    if not can_prepack(getattr(torch, dtype)):
        pytest.skip("not on this CPU")
    folder = save_text_llama(tmp_path)
    draft = {"method": "draft_model", "model": str(save_text_llama(tmp_path / "draft", seed=3))}
    prompts = ["The sea", "A list: a b c a b c", "Once", "one two one two one"]
    params = [SamplingParams(temperature=place % 2, seed=place, max_tokens=20) for place in range(4)]
    alone = LLM(folder, dtype=dtype, max_num_seqs=1)
    drafting = LLM(folder, dtype=dtype, max_num_seqs=4, speculative_config=draft)
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)] for llm in (alone, drafting)
    ]
    assert answers[0] == answers[1]


def test_layers_whose_prepacked_products_are_less_even_stay_as_they_are(monkeypatch):
    """Else fewer sizes of steps would be left, or none."""
    right = prepacking.sizes_like_anchor

    def uneven(way, *arguments):
        return right(way, *arguments) - ({7} if way is prepacking.as_prepacked else set())

    model = make_model("gpt2").float()
    can_be_seven = {
        name for name, layer in model.named_modules() if is_packable(layer) and 7 in plain_sizes(layer)
    }
    monkeypatch.setattr(prepacking, "sizes_like_anchor", uneven)
    packed = {name for name, layer in prepack(model).named_modules() if isinstance(layer, PrepackedLinear)}
    assert can_be_seven
    assert not packed & can_be_seven


def plain_sizes(layer):
    way = products.as_linear if isinstance(layer, nn.Linear) else products.as_conv1d
    return products.sizes_like_anchor(way, *prepacking.description(layer), 128)


def test_prepacked_layers_go_through_files_as_they_were(tmp_path):
    layer = PrepackedLinear(torch.randn(8, 16), torch.randn(8))
    torch.save(layer, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    inputs = torch.randn(3, 16)
    assert torch.equal(again(inputs), layer(inputs))
    assert not again.training
    assert not layer.training


def test_tying_weights_anew_is_refused_in_words():
    packed = prepacked_copy(text_llama().float())
    with pytest.raises(RuntimeError, match="cannot be changed; load the model with prepack=False"):
        packed.lm_head.weight = packed.get_input_embeddings().weight
