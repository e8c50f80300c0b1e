import pytest

from batchspec.cli.records import ResultWriter, check_output, finished_rows, input_format, read_records


def read(tmp_path, content, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_records(str(path), input_format(name, None)))


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


def test_a_missing_input_and_an_unknown_format_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--input .*none.jsonl' cannot be read: No such file"):
        list(read_records(str(tmp_path / "none.jsonl"), "jsonl"))
    with pytest.raises(ValueError, match="--format must be one of jsonl, txt, got 'csv'"):
        input_format("x.csv", "csv")


def test_an_output_that_would_be_lost_or_cannot_be_written_is_refused(tmp_path):
    existing = tmp_path / "out.jsonl"
    existing.write_text("{}\n")
    with pytest.raises(ValueError, match="exists; give --resume to go on with it or --overwrite"):
        check_output(str(existing), resume=False, overwrite=False)
    check_output(str(existing), resume=True, overwrite=False)
    check_output(str(existing), resume=False, overwrite=True)
    check_output("-", resume=False, overwrite=False)
    with pytest.raises(ValueError, match="in a folder that exists"):
        check_output(str(tmp_path / "no" / "out.jsonl"), resume=False, overwrite=False)
    with pytest.raises(ValueError, match="must be a file, not a folder"):
        check_output(str(tmp_path), resume=False, overwrite=True)
    with pytest.raises(ValueError, match="must not be the --input"):
        check_output(str(existing), resume=False, overwrite=True, input_path=str(existing))
    with pytest.raises(ValueError, match="exclude each other"):
        check_output(str(existing), resume=True, overwrite=True)
    with pytest.raises(ValueError, match="--resume needs an --output file"):
        check_output("-", resume=True, overwrite=False)


def write(path, *indices):
    with ResultWriter(str(path), append=False) as writer:
        for index in indices:
            writer.write(index, {"prompt": "é\ud800"}, {"output": {"text": "ü"}})


def test_results_are_read_back_by_index(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, 4, 1)
    rows, size = finished_rows(path)
    assert list(rows) == [4, 1]
    assert size == path.stat().st_size
    assert rows[4] == {"index": 4, "prompt": "é\ud800", "output": {"text": "ü"}}


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_last_line_does_not_count_and_nothing_else(tmp_path, kept):
    path = tmp_path / "out.jsonl"
    write(path, 0, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:kept])
    rows, size = finished_rows(path)
    assert (list(rows), size) == ([0], len(lines[0]))


def test_a_whole_last_line_without_its_line_break_is_torn_too(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert list(finished_rows(path)[0]) == [0]


@pytest.mark.parametrize("content", ['{"something": "else"}\nmore\n', '{"a": 1}\n', "my only notes", "[]"])
def test_a_file_that_is_not_ours_is_refused(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="line 1 is not a result of batchspec generate"):
        finished_rows(path)
