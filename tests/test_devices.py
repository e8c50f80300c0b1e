"""The same tokens on every device that is there; on a GPU, one host synchronisation a round."""

import warnings

import pytest
import torch
from greedy import greedy
from toy_folders import text_llama

from batchspec import LLM
from batchspec.models.noise import noisy_copy

PROMPTS = [[5, 6, 7], [8] * 30, [9], [5, 6, 5, 6, 5]]
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
METHODS = [None, "ngram", "draft_model"]
STRATEGIES = ["packed", "eqspec", "exspec"]


def make_llm(device, method, max_num_seqs, strategy="packed"):
    model = text_llama(seed=1).to(device)
    config = {"method": method, "num_speculative_tokens": 3} if method else None
    if method == "draft_model":
        config["model"] = noisy_copy(model)
    return LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=max_num_seqs,
        speculative_config=config,
        strategy=strategy,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_equal_those_of_transformers_on_the_device(device, strategy, method):
    llm = make_llm(device, method, max_num_seqs=2, strategy=strategy)
    assert llm.engine.runner.device.type == device
    outputs = llm.generate(PROMPTS, greedy(max_tokens=20, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt], device=device)
        alone = llm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, eos_token_id=None, do_sample=False
        )
        assert output.outputs[0].token_ids == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_round_waits_for_the_device_once(device, method):
    llm = make_llm(device, method, max_num_seqs=4)
    for serial, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(serial), prompt, greedy(max_tokens=40, ignore_eos=True))
    llm.engine.step()  # with the prompts
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchronizing" in str(wait.message)]) <= 1
