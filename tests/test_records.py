import pytest

from batchspec.records import read_records


def read(tmp_path, content, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_records(str(path), name.split(".")[-1], reserved=("output",)))


def test_jsonl_lines_keep_their_fields_and_their_place(tmp_path):
    content = (
        b'{"prompt": "a", "id": 7}\n\n{"turns": ["x", "y"]}\r\n{"messages": [{"role": "user", "content": "h"}]}'
    )
    records = read(tmp_path, b"\xef\xbb\xbf" + content)
    assert [record.index for record in records] == [0, 2, 3]
    assert [record.error for record in records] == [None] * 3
    assert records[0].fields == {"prompt": "a", "id": 7}


def test_a_text_file_has_a_prompt_per_line(tmp_path):
    records = read(tmp_path, "Grüße\n\n{x}\n".encode(), "in.txt")
    assert [(record.index, record.fields["prompt"]) for record in records] == [(0, "Grüße"), (2, "{x}")]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "must be a JSON object with one of the fields prompt, messages, turns"),
        (b"{}", "must have exactly one of the fields prompt, messages, turns, has none"),
        (b'{"prompt": "a", "turns": ["b"]}', "has prompt, turns"),
        (b'{"prompt": 3}', "prompt must be text or a list of token ids"),
        (b'{"prompt": [true]}', "prompt must be text or a list of token ids"),
        (b'{"messages": []}', "messages must be a list"),
        (b'{"messages": "hi"}', "messages must be a list"),
        (b'{"turns": []}', "turns must be a list of texts"),
        (b'{"prompt": "a", "output": 1}', "field 'output' is where results go"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_the_others_are_read(tmp_path, line, error):
    records = read(tmp_path, b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    assert [record.error is None for record in records] == [True, False, True]
    assert error in records[1].error
    assert records[1].line == 2


def test_a_missing_file_is_named_by_its_option(tmp_path):
    with pytest.raises(ValueError, match=r"--dataset .*none.jsonl' cannot be read: No such file"):
        list(read_records(str(tmp_path / "none.jsonl"), "jsonl", "--dataset"))
