"""The drafter that batchspec brings: it drafts well for the bundled model, and for no other."""

from __future__ import annotations

import pytest
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM, SamplingParams
from batchspec.cli.demo_prompts import choose_prompts

CONFIG = {"method": "draft_model", "num_speculative_tokens": 2, "adaptive": False}


@pytest.mark.real_model
@pytest.mark.timeout(300)
def test_it_drafts_for_the_bundled_model_and_changes_no_token(smollm):
    chats = [[{"role": "user", "content": prompt}] for prompt in choose_prompts(0).values()]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    answers = []
    for speculation in (None, CONFIG):
        llm = LLM(smollm, dtype="bfloat16", max_num_seqs=len(chats), speculative_config=speculation)
        answers.append([output.outputs[0].token_ids for output in llm.chat(chats, params, use_tqdm=False)])
    assert answers[0] == answers[1]
    stats = llm.engine.stats
    first_accepted = stats.num_accepted_at[0] / stats.num_drafted_at[0]
    assert first_accepted > 0.3  # an untrained one has 0.06


def test_it_is_refused_for_another_target():
    with pytest.raises(ValueError, match=r"model must be given .* drafts for bundled_model\(\) only"):
        LLM(text_llama(seed=1), tokenizer=byte_tokenizer(), speculative_config={"method": "draft_model"})
