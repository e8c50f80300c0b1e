"""The most memory that a run took."""

import os

import pytest
import torch

from batchspec.bench.memory import CLEAR, peak, start_peak

CPU = torch.device("cpu")


@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="this system does not tell")
def test_a_peak_is_that_since_the_start():
    start_peak(CPU)
    low = peak(CPU)
    block = torch.ones(1 << 24)  # 64 MiB
    del block
    high = peak(CPU)
    assert high - low > 50 << 20
    start_peak(CPU)
    assert high - peak(CPU) > 50 << 20


def test_where_the_system_does_not_tell_nothing_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("batchspec.bench.memory.CLEAR", tmp_path / "missing")
    start_peak(CPU)
    assert peak(CPU) is None
