"""Invariant numerics: tiny half-precision models of many kinds, and the probe that finds their shapes."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import MAX_LENGTH, VOCAB_SIZE, make_model

from batchspec import LLM, SamplingParams
from batchspec.layout.packed import pack
from batchspec.layout.shapes import Shapes
from batchspec.models import attention_trial, products
from batchspec.models.attention_trial import find_queries
from batchspec.models.invariance import Limits, attention_kinds, find_shapes, token_counts
from batchspec.models.products import cancelling
from batchspec.models.runner import PackedRunner

FAMILIES = ("llama", "mistral", "mixtral", "gemma2", "gpt2", "gpt_oss")
"""Full attention, a sliding window, experts, capped scores, another kind of linear layer, and sinks."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def model(family: str, dtype: torch.dtype):
    return make_model(family).to(dtype)


@cache
def make_llm(family: str, dtype: torch.dtype, batch_size: int, drafter: str) -> LLM:
    drafting = {
        "none": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5},
        "itself": {"method": "draft_model", "model": model(family, dtype), "num_speculative_tokens": 3},
    }
    return LLM(
        model(family, dtype),
        skip_tokenizer_init=True,
        max_num_seqs=batch_size,
        max_model_len=MAX_LENGTH,
        speculative_config=drafting[drafter],
    )


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.5]),
            top_k=st.sampled_from([0, 5]),
            seed=st.integers(0, 99),
            max_tokens=st.integers(1, 12),
        ),
    ),
    min_size=1,
    max_size=7,
)


def run(llm: LLM, prompts_and_params) -> list[list[int]]:
    prompts, params = map(list, zip(*prompts_and_params, strict=True))
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(
    requests=requests,
    dtype=st.sampled_from(DTYPES),
    batch_size=st.sampled_from([2, 3, 8]),
    drafter=st.sampled_from(["none", "ngram", "itself"]),
    order=st.randoms(use_true_random=False),
)
def test_no_token_depends_on_the_batch(family, requests, dtype, batch_size, drafter, order):
    alone = [run(make_llm(family, dtype, 1, "none"), [request])[0] for request in requests]
    places = list(range(len(requests)))
    order.shuffle(places)
    together = run(make_llm(family, dtype, batch_size, drafter), [requests[place] for place in places])
    assert together == [alone[place] for place in places]


def test_cancelling_sums_are_what_rounding_leaves():
    left, right = cancelling((3, 7), (4, 7), torch.empty(0, dtype=torch.float64))
    assert (left @ right.T).abs().max() < 1e-12
    assert left.abs().min(dim=1).values.tolist() == [0, 0, 0]  # an odd number has one that is no pair


def test_a_product_whose_sums_go_another_way_at_some_sizes_is_found_out(monkeypatch):
    """Half precision rounds the difference away in all but one of 65,000 ordinary sums."""
    linear = F.linear

    def other_way(rows, weight, bias=None):
        if rows.shape[0] in (3, 7):
            return linear(rows.flip(1), weight.flip(1), bias)
        return linear(rows, weight, bias)

    monkeypatch.setattr(products.F, "linear", other_way)
    monkeypatch.setattr(products, "_answers", {})
    counts = token_counts(model("llama", torch.bfloat16), 16)
    assert counts[-1] >= 16
    assert not {3, 7} & set(counts)


def scores_another_way(right, grids, keys, masks, *rules):
    if grids[0].shape[1] >= 10:
        return right(grids, keys, masks, *rules)
    return right([grids[0].flip(2)], [keys[0].flip(2)], masks, *rules)


def weights_another_way(right, scored, *others):
    return right(scored, *others) * (1 + 2**-22 * (scored.shape[2] < 10))  # which bfloat16 would not show


def logs_another_way(right, scored, weights):
    return right(scored, weights) * (1 + 2**-22 * (scored.shape[2] < 10))


def sums_another_way(right, weights, values, sizes):
    if sizes[0] >= 10 * len(values[0]):
        return right(weights, values, sizes)
    return right(weights.flip(1), [values[0].flip(1)], sizes)


WAYS = {
    "scores": scores_another_way,
    "grid_weights": weights_another_way,
    "logs_of_sums": logs_another_way,
    "weighted_sums": sums_another_way,
}


@pytest.mark.parametrize("stage", WAYS)
def test_attention_that_goes_another_way_for_few_queries_is_found_out(monkeypatch, stage):
    kinds = attention_kinds(model("llama", torch.bfloat16))
    monkeypatch.setattr(products, "_answers", {})
    monkeypatch.setattr(attention_trial, stage, partial(WAYS[stage], getattr(attention_trial, stage)))
    assert max(find_queries(kinds)) == 16


def test_attention_that_depends_on_the_place_of_a_query_is_found_out(monkeypatch):
    kinds = attention_kinds(model("llama", torch.bfloat16))
    right = attention_trial.grid_sums

    def other_way(weights, values):
        sums = right(weights, values)
        sums[:, :, ::2] = right(weights.flip(3), values.flip(2))[:, :, ::2]
        return sums

    monkeypatch.setattr(products, "_answers", {})
    monkeypatch.setattr(attention_trial, "grid_sums", other_way)
    assert find_queries(kinds) is None


def test_attention_that_depends_on_the_blocks_of_others_is_found_out(monkeypatch):
    kinds = attention_kinds(model("llama", torch.bfloat16))
    right = attention_trial.grid_sums

    def other_way(weights, value):
        return right(weights, value) if len(weights) != 33 else right(weights.flip(3), value.flip(2))

    monkeypatch.setattr(products, "_answers", {})
    monkeypatch.setattr(attention_trial, "grid_sums", other_way)
    assert find_queries(kinds) is None


def test_a_model_that_mixes_the_tokens_of_a_step_is_refused(monkeypatch):
    mixing = make_model("llama").to(torch.bfloat16)
    monkeypatch.setattr(products, "_answers", {})

    def mix(module, arguments, output):
        return output + output.mean(dim=1, keepdim=True)

    mixing.model.layers[0].mlp.register_forward_hook(mix)
    with (
        pytest.warns(UserWarning, match="all are padded"),
        pytest.raises(ValueError, match=r"numerics='invariant' cannot be had .* 'llama' in torch.bfloat16 on cpu"),
    ):
        find_shapes(mixing, Limits(4, 3, MAX_LENGTH))


def hooked(hook):
    """A model that computes on its own in the middle."""
    made = make_model("llama").to(torch.float32)
    made.model.layers[0].mlp.register_forward_hook(hook)
    return made


def test_sizes_at_which_an_activation_rounds_otherwise_are_dropped():
    """As with three threads and more, whose parts of a tensor end in the middle of a token."""

    def round_otherwise(module, arguments, output):
        return output if output.shape[1] != 7 else torch.cat([output[:, :5], output[:, 5:] * (1 + 2**-20)], dim=1)

    before = find_shapes(model("llama", torch.float32), Limits(4, 3, MAX_LENGTH)).token_counts
    after = find_shapes(hooked(round_otherwise), Limits(4, 3, MAX_LENGTH)).token_counts
    assert set(before) - set(after) == {7} & set(before)
    assert max(after) >= 12


def test_a_model_of_one_size_only_says_what_that_means():
    def depend_on_the_size(module, arguments, output):
        return output * (1 + output.shape[1] * 2**-20)

    assert find_shapes(hooked(depend_on_the_size), Limits(4, 3, MAX_LENGTH)).token_counts == (32,)
    with pytest.warns(UserWarning, match="all are padded to 48 tokens, and only engines with the same"):
        shapes = find_shapes(hooked(depend_on_the_size), Limits(8, 6, MAX_LENGTH))
    assert shapes.token_counts == (48,)


def test_a_product_is_tried_at_every_place_and_with_conv1d_s_layout():
    def reversed_at(places):
        def way(weights, bias):
            def multiply(rows):
                result = rows @ weights.t()
                result[places] = (rows.flip(1) @ weights.t().flip(0))[places]
                return result

            return multiply

        return way

    like = torch.empty(0, dtype=torch.bfloat16)
    uneven = products.sizes_like_anchor(reversed_at(slice(40, 88)), (48, 64), False, like, 128)
    assert max(uneven) <= 48  # larger steps have places whose sums go another way

    def turned_around(weights, bias):
        right = products.as_conv1d(weights, bias), products.as_conv1d(weights.flip(1), bias)
        return lambda rows: right[0](rows) if len(rows) != 9 else right[1](rows.flip(1))

    found = products.sizes_like_anchor(turned_around, (48, 64), True, like, 128)
    assert 9 not in found
    assert 10 in found


@torch.inference_mode()
@pytest.mark.parametrize("family", ["deepseek_v3", "afmoe"])
def test_routers_and_gates_keep_to_it(family):
    """Their sigmoids are functions of a few numbers per token, which seldom fill a vector."""
    routed = model(family, torch.float32)
    shapes = find_shapes(routed, Limits(7, 3, MAX_LENGTH))
    tokens = torch.randint(VOCAB_SIZE, (40, 7, 3), generator=torch.Generator().manual_seed(0))
    for rows in tokens:
        together = PackedRunner(routed, 7, MAX_LENGTH, shapes).forward(pack([0] * 7, [3] * 7), rows.flatten())
        for row, logits in zip(rows, together.split(3), strict=True):
            assert torch.equal(PackedRunner(routed, 1, MAX_LENGTH, shapes).forward(pack([0], [3]), row), logits)


def test_experts_that_are_computed_in_a_loop_are_refused():
    looped = make_model("mixtral").float()
    for module in looped.modules():
        if hasattr(module, "_is_expert_parallel"):
            del module._is_expert_parallel
    with pytest.raises(ValueError, match="'mixtral': its experts are computed in shapes that"):
        find_shapes(looped, Limits(2, 2, MAX_LENGTH))


def test_engines_of_all_sizes_share_one_class_of_shapes():
    """Else a request would get other tokens in larger batches."""
    found = [find_shapes(model("llama", torch.float32), Limits(rows, columns, MAX_LENGTH))
             for rows, columns in ((1, 1), (3, 6), (16, 5))]  # fmt: skip
    assert len({(shapes.min_queries, shapes.query_multiple) for shapes in found}) == 1
    shared = set(found[0].token_counts)
    assert all(shared <= set(shapes.token_counts) for shapes in found)


def test_a_step_that_is_too_large_for_its_shapes_is_refused():
    with pytest.raises(ValueError, match="a step must have at most 8 tokens, got 9"):
        Shapes((4, 8), 1, 1).num_tokens(9)


def test_the_model_s_experts_are_left_as_they_were():
    before = model("mixtral", torch.float32).config._experts_implementation
    run(make_llm("mixtral", torch.float32, 2, "ngram"), [([1, 2, 3], SamplingParams(max_tokens=3))])
    assert model("mixtral", torch.float32).config._experts_implementation == before
