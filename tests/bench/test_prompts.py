import json

import pytest
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM
from batchspec.bench.prompts import load_prompts

ROWS = [
    {"category": "a", "turns": ["one", "two"]},
    {"category": "a", "turns": ["three"]},
    {"category": "b", "messages": [{"role": "user", "content": "four"}]},
    {"category": "c", "prompt": "five"},
    {"category": "c", "prompt": [6, 7]},
]


@pytest.fixture(scope="module")
def llm():
    return LLM(text_llama(), tokenizer=byte_tokenizer())


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path


def texts(llm, prompts):
    return [llm.tokenizer.decode(prompt) for prompt in prompts]


def test_categories_take_turns_and_the_first_turn_is_asked(llm, dataset):
    prompts = load_prompts(dataset, llm, 4, 100)
    assert texts(llm, prompts) == [
        "<user>one\n<assistant>",
        "<user>four\n<assistant>",
        "five",
        "<user>three\n<assistant>",
    ]


def test_long_prompts_are_left_out(llm, dataset):
    assert texts(llm, load_prompts(dataset, llm, 1, 4)) == ["five"]


def test_prompts_of_equal_length_are_cut_from_longer_ones(llm, dataset):
    prompts = load_prompts(dataset, llm, 3, 100, prompt_tokens=20)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]


def test_too_few_prompts_and_lines_that_are_none_are_told(llm, dataset, tmp_path):
    with pytest.raises(ValueError, match="--num-prompts must be at most 5"):
        load_prompts(dataset, llm, 6, 100)
    bad = tmp_path / "bad.jsonl"
    for text in ("{", '{"text": "x"}', '{"turns": []}', "7"):
        bad.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 is not JSON|line 1 must have turns, messages or prompt"):
            load_prompts(bad, llm, 1, 100)
