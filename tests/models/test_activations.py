"""Sizes at which an activation gives a token other bits are found, and only those."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from batchspec.models import products
from batchspec.models.activations import sizes_of_even_activations

SIZES = (1, 2, 3, 4, 5, 8, 16, 32, 64)


@torch.library.custom_op("batchspec_tests::uneven", mutates_args=(), tags=torch.Tag.pointwise)
def uneven(rows: Tensor) -> Tensor:
    """Rounds a number in 20 of the last 16 otherwise, if the tensor does not fill whole vectors."""
    result = torch.relu(rows)
    if rows.numel() % 32:
        tail = result.view(-1)[-16:]
        tail[tail > 1.6] *= 1 + 2**-20
    return result


@torch.library.custom_op("batchspec_tests::placed", mutates_args=(), tags=torch.Tag.pointwise)
def placed(rows: Tensor) -> Tensor:
    """Rounds the last number otherwise, however many there are."""
    result = rows.clone()
    result.view(-1)[-1] *= 1 + 2**-20
    return result


class Activation(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return uneven(rows)


def router(rows: Tensor) -> Tensor:
    return uneven(rows.to(torch.float32)).to(rows.dtype)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(products, "_answers", {})


def even_sizes(function, width, sizes=SIZES, dtype=torch.float32):
    return sizes_of_even_activations(lambda count: function(torch.ones(1, count, width, dtype=dtype)), sizes)


def test_sizes_whose_last_numbers_are_rounded_otherwise_are_dropped():
    assert even_sizes(nn.Sequential(nn.ReLU(), Activation()), 16) == (2, 4, 8, 16, 32, 64)
    assert even_sizes(nn.Sequential(nn.ReLU(), Activation()), 32) == SIZES


def test_a_function_is_tried_as_a_module_is_and_in_the_type_that_it_is_given():
    assert even_sizes(router, 16, dtype=torch.bfloat16) == (2, 4, 8, 16, 32, 64)


def test_one_that_depends_on_the_place_has_no_even_size():
    assert even_sizes(placed, 16) == ()


def test_roots_and_logarithms_are_tried_with_what_they_are_made_for():
    assert even_sizes(lambda rows: rows.rsqrt() + rows.log(), 1, sizes=(16, 32, 64)) == (16, 32, 64)


def test_what_is_rounded_exactly_drops_no_size():
    linear = nn.Linear(16, 16)
    assert even_sizes(lambda rows: linear(rows) * rows + 1, 16) == SIZES


@torch.library.custom_op("batchspec_tests::to_the", mutates_args=(), tags=torch.Tag.pointwise)
def to_the(base: float, rows: Tensor) -> Tensor:
    return uneven(rows * base)


def test_a_tensor_may_stand_behind_a_number():
    assert even_sizes(lambda rows: to_the(2.0, rows), 16) == (2, 4, 8, 16, 32, 64)


def test_sizes_that_are_no_part_of_the_largest_are_held_against_a_whole_step():
    assert even_sizes(uneven, 16, sizes=(2, 34, 40)) == (2, 34, 40)


def test_what_is_not_a_number_at_all_is_no_difference():
    assert even_sizes(lambda rows: (rows * 0 + 5).acos(), 16) == SIZES


def test_what_is_the_same_in_all_steps_is_not_tried():
    frequencies = torch.ones(16)
    assert even_sizes(lambda rows: rows * uneven(frequencies), 16) == SIZES


def test_of_no_sizes_none_is_even():
    assert even_sizes(nn.SiLU(), 16, sizes=()) == ()
