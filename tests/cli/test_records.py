import pytest

from batchspec.cli.records import ResultWriter, check_output, finished_rows, input_format


def test_the_format_is_named_or_follows_the_ending_of_the_file():
    assert [input_format(path, None) for path in ("a.txt", "a.jsonl", "-")] == ["txt", "jsonl", "jsonl"]
    assert input_format("a.txt", "jsonl") == "jsonl"
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
