"""Both padded runners against the packed one: the same logits, step by step."""

import pytest
import torch
from greedy import greedy
from toy_models import MAX_LENGTH, PADDED_FAMILIES, make_model, make_model_of

from batchspec import LLM
from batchspec.layout.packed import pack
from batchspec.models.noise import noisy_copy
from batchspec.models.padded_runner import PoolRunner, RealigningRunner
from batchspec.models.reference import generate_alone
from batchspec.models.runner import PackedRunner
from batchspec.stats import StageTimer

RUNNERS = [RealigningRunner, PoolRunner]
FAMILIES = ["llama", "mistral", "gemma2", "gpt2"]


def compare(runners, lengths, num_new, seed):
    tokens = torch.randint(90, (sum(num_new),), generator=torch.Generator().manual_seed(seed))
    logits = [runner.forward(pack(lengths, num_new), tokens) for runner in runners]
    for other in logits[1:]:
        assert torch.allclose(logits[0], other, atol=2e-5), "gemma2's own attention rounds its softmax to float32"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_steps_of_ragged_rows_give_the_packed_logits(family, runner):
    model = make_model(family)
    runners = [PackedRunner(model, 3, 64), runner(model, 3, 64, StageTimer())]
    for each in runners:
        each.prefill(0, [5, 6, 7])
        each.prefill(2, list(range(20, 33)))
    compare(runners, [3, 0, 13], [1, 1, 1], 0)
    compare(runners, [4, 1, 14], [5, 1, 3], 1)
    compare(runners, [6, 2, 14], [1, 5, 2], 2)  # row 0 kept 2 of 5, row 2 none of 3
    for each in runners:
        each.release_row(0, 2, 16)
    compare(runners, [16, 7], [2, 2], 3)
    for each in runners:
        each.prefill(1, [9, 8, 7, 6], 7)
    compare(runners, [18, 11], [1, 4], 4)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@torch.inference_mode()
def test_a_row_far_shorter_than_the_step_is_wide_sees_no_nan(family, runner):
    """Its empty places lie beyond the window of the last token: each must see at least itself."""
    model = make_model(family)
    runners = [PackedRunner(model, 2, 64), runner(model, 2, 64, StageTimer())]
    compare(runners, [0, 0], [3, 2], 0)
    compare(runners, [3, 2], [1, 16], 1)
    compare(runners, [4, 18], [1, 1], 2)


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_a_row_that_adds_nothing_and_holds_nothing_may_take_part(runner):
    model = make_model("llama")
    runners = [PackedRunner(model, 2, 64), runner(model, 2, 64, StageTimer())]
    compare(runners, [0, 0], [2, 0], 0)
    compare(runners, [2, 0], [1, 0], 1)
    compare(runners, [3, 0], [1, 2], 2)


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_a_long_prompt_is_computed_in_chunks_like_in_one_piece(monkeypatch, runner):
    model = make_model("mistral")
    whole, parts = runner(model, 1, 64, StageTimer()), runner(model, 1, 64, StageTimer())
    tokens = [token % 90 for token in range(2, 40)]
    whole.prefill(0, tokens)
    monkeypatch.setattr("batchspec.models.runner.PREFILL_CHUNK", 7)
    parts.prefill(0, tokens)
    compare([whole, parts], [38], [3], 0)


@pytest.mark.parametrize("strategy", ["eqspec", "exspec"])
@pytest.mark.parametrize("family", [*PADDED_FAMILIES, "llama", "gpt2"])
def test_a_row_near_the_end_of_the_context_may_share_a_step_with_drafts(family, strategy):
    """The rectangle would be wider than the context window, for which mpt and gpt_neo have no mask."""
    model = make_model(family)
    prompts = [[1] * (MAX_LENGTH - 1), [5, 6] * 10, [3] * (MAX_LENGTH - 3)]
    budgets = [1, 10, 3]
    for drafting in ({"method": "ngram"}, {"method": "draft_model", "model": noisy_copy(model)}):
        llm = LLM(
            model,
            skip_tokenizer_init=True,
            max_num_seqs=3,
            max_model_len=MAX_LENGTH,
            strategy=strategy,
            speculative_config=drafting,
        )
        outputs = llm.generate(prompts, [greedy(max_tokens=n) for n in budgets], use_tqdm=False)
        for prompt, budget, output in zip(prompts, budgets, outputs, strict=True):
            assert output.outputs[0].token_ids == generate_alone(model, prompt, budget, [])


@pytest.mark.parametrize("runner", RUNNERS)
@torch.inference_mode()
def test_kept_logits_are_those_asked_for(runner):
    model = make_model("llama")
    padded = runner(model, 2, 64, StageTimer())
    step = pack([0, 0], [3, 1])
    tokens = torch.tensor([4, 5, 6, 7])
    everything = padded.forward(step, tokens)
    assert torch.equal(padded.forward(step, tokens, keep=step.last_index), everything[[2, 3]])


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_model_in_train_mode_is_refused(runner):
    model = make_model_of("llama")
    padded = runner(model, 1, 64, StageTimer())
    model.train()
    with pytest.raises(RuntimeError, match="train mode"):
        padded.prefill(0, [1, 2, 3])
