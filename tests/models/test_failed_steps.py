"""A step that fails in the middle of a model loses nothing: the next one goes on, whatever the strategy."""

import pytest
import torch
from greedy import greedy
from toy_models import MAX_LENGTH, make_model

from batchspec import LLM
from batchspec.models.reference import generate_alone

PROMPTS = [[5, 6, 7], [8], [9, 1, 2, 3, 4, 5, 6, 7], [2, 3]]
BUDGETS = [20, 14, 17, 9]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", ["packed", "eqspec", "exspec"])
@pytest.mark.parametrize("failing_call", [*range(12), 20, 31, 45])
def test_the_step_after_a_failed_one_goes_on(strategy, failing_call, error, monkeypatch):
    """One layer of the target or of the draft model fails once: in a prompt, in a draft, in a verification."""
    model, draft = make_model("gemma2"), make_model("gemma2", seed=1)
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=3,
        max_model_len=MAX_LENGTH,
        strategy=strategy,
        speculative_config=config,
    )
    for serial, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS, strict=True)):
        llm.engine.add_request(str(serial), prompt, greedy(max_tokens=budget))
    calls = []

    def fail_once(module, arguments):
        calls.append(module)
        if len(calls) == failing_call + 1:
            raise error("out of memory")

    hooks = [each.model.layers[2].mlp.register_forward_pre_hook(fail_once) for each in (model, draft)]
    finished, num_failed = {}, 0
    while llm.engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
        except error:
            num_failed += 1
    for hook in hooks:
        hook.remove()
    assert num_failed == 1
    for serial, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS, strict=True)):
        assert finished[str(serial)].outputs[0].token_ids == generate_alone(model, prompt, budget, [])
        assert torch.isfinite(torch.tensor(finished[str(serial)].metrics.acceptance_rate))


@pytest.mark.parametrize("strategy", ["packed", "eqspec", "exspec"])
@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8], [9, 1], [3]], [[2], [3], [4]]])
def test_a_row_is_aborted_after_a_pass_that_failed_before_the_first_layer(strategy, prompts):
    model = make_model("llama")
    llm = LLM(model, skip_tokenizer_init=True, max_num_seqs=3, max_model_len=MAX_LENGTH, strategy=strategy)
    for serial, prompt in enumerate(prompts):
        llm.engine.add_request(str(serial), prompt, greedy(max_tokens=6))
    num_prompts = sum(len(prompt) > 1 for prompt in prompts)
    calls = []

    def fail_once(module, arguments):
        calls.append(module)
        if len(calls) == num_prompts + 1:
            raise RuntimeError("out of memory")

    hook = model.model.embed_tokens.register_forward_pre_hook(fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.engine.step()
    hook.remove()
    llm.engine.abort_request("0")
    finished = {}
    while llm.engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
    for serial, prompt in enumerate(prompts[1:], start=1):
        assert finished[str(serial)].outputs[0].token_ids == generate_alone(model, prompt, 6, [])
