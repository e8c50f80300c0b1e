"""Files that reports are written to."""

import pytest

from batchspec import documents
from batchspec.documents import write_whole


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
