"""Files that reports are written to."""

import os
from pathlib import Path

import pytest

from batchspec import documents
from batchspec.documents import check_writable, write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.html"
    write_whole(path, "first")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(documents.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_whole(path, "second")
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.html"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~documents._umask()


def test_what_a_report_would_destroy_is_refused(tmp_path):
    prompts, pipe = tmp_path / "prompts.jsonl", tmp_path / "pipe"
    prompts.write_text("{}")
    os.mkfifo(pipe)
    check_writable("--json", tmp_path / "new.json", {"--dataset": prompts, "--report": None})
    check_writable("--json", prompts)  # a file of an earlier run
    with pytest.raises(ValueError, match="--json must not be the --dataset"):
        check_writable("--json", tmp_path / "." / "prompts.jsonl", {"--dataset": prompts})
    for path in (pipe, tmp_path, tmp_path / "nowhere" / "a.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            check_writable("--json", path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "prompts.jsonl"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody may write to")
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_run():
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable("--json", Path("/proc/a.json"))
