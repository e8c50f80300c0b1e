import torch
from toy_models import make_model

from batchspec.models.noise import noisy_copy


def parameters(model):
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_the_same_seed_gives_the_same_copy_and_the_model_stays_as_it_is():
    model = make_model("llama")
    before = parameters(model).clone()
    assert torch.equal(parameters(noisy_copy(model, 0.1, seed=3)), parameters(noisy_copy(model, 0.1, seed=3)))
    assert not torch.equal(parameters(noisy_copy(model, 0.1, seed=3)), parameters(noisy_copy(model, 0.1, seed=4)))
    assert torch.equal(parameters(model), before)


def test_noise_is_as_large_as_asked_and_the_global_random_state_is_left_alone():
    model = make_model("llama")
    state = torch.get_rng_state()
    matrix, noisy = model.lm_head.weight.detach(), noisy_copy(model, 0.1).lm_head.weight.detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(float((noisy - matrix).std() / matrix.std()) - 0.1) < 0.01
