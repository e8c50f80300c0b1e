import json

import pytest
from toy_folders import text_llama
from toy_text import byte_tokenizer

from batchspec import LLM
from batchspec.prompts import digest, load_prompts

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
    assert len(load_prompts(dataset, llm, None, 100)) == 5
    bad = tmp_path / "bad.jsonl"
    bad.write_text("")
    with pytest.raises(ValueError, match="has no prompt that fits"):
        load_prompts(bad, llm, None, 100)
    for text, message in LINES:
        bad.write_text(text)
        with pytest.raises(ValueError, match=f"line 1: {message}"):
            load_prompts(bad, llm, 1, 100)


LINES = [
    ("{", "not JSON"),
    ('{"text": "x"}', "must have exactly one of the fields"),
    ('{"turns": []}', "turns must be a list"),
    ('{"messages": null}', "messages must be a list"),
    ("7", "must be a JSON object"),
    ('{"prompt": [1, 99999]}', "prompt must hold token ids from 0 to 257"),
    ('{"prompt": [-1]}', "prompt must hold token ids"),
    ('{"prompt": [1.5]}', "prompt must be text or a list of token ids"),
    ("[" * 100_000, "not JSON"),
]


def test_text_with_other_line_breaks_and_a_byte_order_mark_is_read(llm, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\n{"prompt": "c\x85d"}\n'.encode())
    assert texts(llm, load_prompts(path, llm, 2, 100)) == ["a\u2028b", "c\x85d"]


def test_other_prompts_have_another_digest():
    assert digest([[1, 2], [3]]) != digest([[1], [2, 3]]) != digest([[1], [3, 2]])
    assert digest([[1, 2]]) == digest([[1, 2]])
