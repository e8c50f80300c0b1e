"""Sizes at which an activation gives a token other bits are found, and only those."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchspec.models import products
from batchspec.models.activations import sizes_of_even_activations

SIZES = (1, 2, 3, 4, 5, 8, 16, 32, 64)


class Uneven(nn.Module):
    """Rounds a number in 20 of the last 16 otherwise, if the tensor does not fill whole vectors."""

    def forward(self, rows):
        result = torch.relu(rows)
        if rows.numel() % 32:
            tail = result.view(-1)[-16:]
            tail[tail > 1.6] *= 1 + 2**-20
        return result


class Doubling(nn.Module):
    """Not an activation: it has another shape, so its numbers are not those of single tokens."""

    def forward(self, rows):
        return torch.cat([rows, rows], dim=-1)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(products, "_answers", {})


def even_sizes(model, width, sizes=SIZES):
    rows = torch.ones(1, 1, width)
    return sizes_of_even_activations(model, lambda: model(rows), sizes, torch.empty(0))


def test_sizes_whose_last_numbers_are_rounded_otherwise_are_dropped():
    assert even_sizes(nn.Sequential(nn.ReLU(), Uneven()), 16) == (2, 4, 8, 16, 32, 64)
    assert even_sizes(nn.Sequential(nn.ReLU(), Uneven()), 32) == SIZES


def test_modules_with_weights_or_of_another_shape_are_not_asked():
    assert even_sizes(nn.Sequential(nn.Linear(16, 16), Doubling()), 16) == SIZES


def test_of_no_sizes_none_is_even():
    assert even_sizes(nn.SiLU(), 16, sizes=()) == ()


def test_hooks_are_taken_away():
    model = nn.Sequential(nn.SiLU())
    even_sizes(model, 48)
    assert not model[0]._forward_hooks
