"""Models of a real shape without weights."""

import json

import pytest
import torch
from toy_folders import text_llama

from batchspec.models.random_weights import random_model


@pytest.fixture
def config(tmp_path):
    values = text_llama().config.to_dict() | {"dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path / "config.json"


@pytest.mark.parametrize(("dtype", "made"), [("auto", torch.float16), ("float32", torch.float32)])
def test_a_file_or_its_folder_makes_the_same_model_each_time(config, dtype, made):
    state = torch.random.get_rng_state()
    first, second = random_model(config, dtype), random_model(config.parent, dtype)
    assert first.dtype == made
    assert not first.training
    assert first.config.num_key_value_heads == 2
    weights = first.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in second.state_dict().items())
    assert weights["lm_head.weight"].float().std() > 0.1, "the config's initializer_range is 0.5"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "text", [None, "no json", "{}", '{"model_type": "nothing"}', "[1]", '{"model_type": "vit"}']
)
def test_what_is_no_config_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"must be the config.json of a causal language model") as refused:
        random_model(path)
    assert len(str(refused.value).splitlines()) == 1
