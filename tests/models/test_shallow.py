"""Models of fewer layers that share a whole one's weights."""

from __future__ import annotations

import pytest
import torch
from toy_models import make_model

from batchspec.models.prepacking import PrepackedLinear, can_prepack, prepacked_copy
from batchspec.models.shallow import stack_parts, with_layers

FAMILIES = ["llama", "gpt2", "gemma2", "gemma3", "qwen2_sliding", "opt", "gptj", "phi", "gpt_neox", "cohere2"]
TOKENS = torch.arange(12).view(2, 6) * 7


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


def storages(model) -> set[int]:
    return {weight.data_ptr() for weight in model.parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_in_order_are_the_model_itself(family):
    model = make_model(family)
    copy = with_layers(model, range(model.config.num_hidden_layers))
    torch.testing.assert_close(logits(copy), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_is_copied_and_the_model_stays_as_it_is(family):
    model = make_model(family)
    wanted, config = logits(model), model.config.to_json_string()
    shallow = with_layers(model, [0])
    assert storages(shallow) < storages(model)
    assert not torch.equal(logits(shallow), wanted)
    assert torch.equal(logits(model), wanted)
    assert model.config.to_json_string() == config
    assert shallow.config is not model.config


def test_layers_out_of_order_keep_their_kind_and_get_their_place():
    model = make_model("gemma2")
    kinds = model.config.layer_types
    shallow = with_layers(model, [0, 3])
    assert shallow.config.layer_types == [kinds[0], kinds[3]]
    assert [layer.self_attn.layer_idx for layer in shallow.model.layers] == [0, 1]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


def test_a_layer_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="layers must be different ones"):
        with_layers(make_model("llama"), [1, 1])


@pytest.mark.parametrize(
    ("family", "norm"),
    [("llama", "model.norm"), ("gpt2", "transformer.ln_f"), ("opt", "model.decoder.final_layer_norm")],
)
def test_layers_and_final_norm_are_found(family, norm):
    assert stack_parts(make_model(family))[1:] == [norm]


@pytest.mark.skipif(not can_prepack(torch.float32), reason="this PyTorch cannot prepack weights")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prepacked_layers_are_shared_too(family):
    model = prepacked_copy(make_model(family).float())
    own = {id(module) for module in model.modules() if isinstance(module, PrepackedLinear)}
    shallow = with_layers(model, [0])
    packed = [module for module in shallow.modules() if isinstance(module, PrepackedLinear)]
    assert len(packed) >= 4
    assert all(id(module) in own for module in packed)


def test_a_layer_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="layers must be from 0 to 1, which the target has, got 2"):
        with_layers(make_model("llama"), [0, 2])
