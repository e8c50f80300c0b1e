"""The data: what the target says, with what it would have said."""

from __future__ import annotations

import pytest
import torch
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM
from batchspec.training.answers import NUM_TOP, make_texts, opening_of_a_turn
from batchspec.training.settings import TrainingSettings
from batchspec.training.shards import Shard, read_shard, write_shard

SETTINGS = TrainingSettings(max_prompt_tokens=20, max_tokens=12, shard_size=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(text_llama(seed=1), tokenizer=byte_tokenizer(), max_num_seqs=4)


@pytest.fixture(scope="module")
def texts(llm):
    return make_texts(llm, SETTINGS, None, 0, lambda tokens: None)


@torch.inference_mode()
def test_labels_are_the_target_s_own_logits(llm, texts):
    for text in texts:
        logprobs = llm.model(text.token_ids[None].long(), use_cache=False).logits[0].log_softmax(-1)
        wanted = logprobs[text.num_prompt_tokens - 1 : -1].topk(NUM_TOP, dim=-1)
        torch.testing.assert_close(text.top_logprobs.double(), wanted.values, rtol=2e-3, atol=2e-3)
        assert torch.equal(text.top_ids[:, 0].long(), wanted.indices[:, 0])


def test_greedy_answers_are_their_own_labels_and_half_are_greedy(texts):
    greedy = [text for text in texts if text.is_greedy]
    assert len(greedy) == len(texts) / 2
    for text in greedy:
        assert torch.equal(text.token_ids[text.num_prompt_tokens :], text.top_ids[:, 0])
    drawn = [text for text in texts if not text.is_greedy]
    assert any(not torch.equal(text.token_ids[text.num_prompt_tokens :], text.top_ids[:, 0]) for text in drawn)


def test_prompts_are_user_turns_in_the_chat_template_and_differ(llm, texts):
    prompts = [llm.tokenizer.decode(text.token_ids[: text.num_prompt_tokens]) for text in texts]
    assert all(prompt.startswith("<user>") and prompt.endswith("\n<assistant>") for prompt in prompts)
    assert len(set(prompts)) == len(prompts)


def test_a_shard_is_the_same_whenever_it_is_made_and_no_two_are(llm, texts):
    again = make_texts(llm, SETTINGS, None, 0, lambda tokens: None)
    other = make_texts(llm, SETTINGS, None, 1, lambda tokens: None)
    assert [text.token_ids.tolist() for text in again] == [text.token_ids.tolist() for text in texts]
    assert not {tuple(text.token_ids.tolist()) for text in other} & {
        tuple(text.token_ids.tolist()) for text in texts
    }


def test_a_shard_is_read_as_it_was_written(tmp_path, texts):
    write_shard(tmp_path / "0.safetensors", Shard(texts, 1.25))
    shard = read_shard(tmp_path / "0.safetensors")
    assert shard.seconds == 1.25
    for one, other in zip(shard.texts, texts, strict=True):
        assert (one.num_prompt_tokens, one.is_greedy) == (other.num_prompt_tokens, other.is_greedy)
        for name in ("token_ids", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]


def test_a_torn_shard_is_refused(tmp_path):
    (tmp_path / "0.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="is no file of this training"):
        read_shard(tmp_path / "0.safetensors")


def test_without_a_template_texts_begin_with_an_end_token(texts):
    llm = LLM(text_llama(seed=1), tokenizer=byte_tokenizer(chat_template=None))
    assert opening_of_a_turn(llm) == [256]
    texts = make_texts(llm, SETTINGS, None, 0, lambda tokens: None)
    assert all(text.token_ids[0] == 256 and text.num_prompt_tokens > 1 for text in texts)
