"""Packed attention against a loop over tokens and heads, written from the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
import transformers.models.phimoe.modeling_phimoe as phimoe
import transformers.models.qwen2_moe.modeling_qwen2_moe as qwen2_moe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PhimoeConfig, Qwen2MoeConfig

from batchspec.layout import block_step
from batchspec.layout.block_step import AttentionLayout, lay_out_attention
from batchspec.layout.blocks import BlockTable
from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.shapes import Shapes
from batchspec.models.attention import NAME, packed_attention, packed_attention_forward


@dataclass(frozen=True)
class Case:
    """One call of the attention function."""

    lengths: list[int]
    num_new: list[int]
    kv_heads: int = 2
    groups: int = 2
    key_size: int = 4
    value_size: int = 4
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scaling: float | None = None
    seed: int = 0

    @property
    def step(self) -> PackedStep:
        return pack(self.lengths, self.num_new)

    def tensors(self, stale: float = 50.0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and sinks. Slots behind a row's tokens hold `stale`, as after a roll back."""
        source = torch.Generator().manual_seed(self.seed)
        step, heads = self.step, self.kv_heads * self.groups

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        query = noise(1, heads, step.num_tokens, self.key_size)
        key = noise(len(self.lengths), self.kv_heads, step.num_slots, self.key_size)
        value = noise(len(self.lengths), self.kv_heads, step.num_slots, self.value_size)
        for row, (length, new) in enumerate(zip(self.lengths, self.num_new, strict=True)):
            key[row, :, length + new :] = stale
            value[row, :, length + new :] = stale
        return query, key, value, noise(heads) if self.has_sinks else None


def attend(case: Case, stale: float = 50.0, **arguments: Any) -> Tensor:
    query, key, value, sinks = case.tensors(stale)
    given_arguments = {"scaling": case.scaling, "sliding_window": case.window, "softcap": case.softcap}
    return call(case.step, query, key, value, s_aux=sinks, **{**given_arguments, **arguments})


BLOCK = 4


def in_blocks(step: PackedStep, *stores: Tensor) -> tuple[AttentionLayout, list[Tensor]]:
    """Lay keys or values `[rows, kv heads, slots, size]` out in blocks; those of the last row come first."""
    table = BlockTable(BLOCK)
    needed = [length + new for length, new in zip(step.lengths, step.num_new, strict=True)]
    for row, slots in reversed(list(zip(step.rows, needed, strict=True))):
        table.give(table.missing([row], [slots]))
    layout = lay_out_attention(step, table)
    pools = []
    for store in stores:
        pool = store.new_zeros(table.num_blocks, store.shape[1], BLOCK, store.shape[3])
        for place, row in enumerate(step.rows):
            for number, block in enumerate(table.rows.get(row, [])):
                part = store[place, :, number * BLOCK : (number + 1) * BLOCK]
                pool[block, :, : part.shape[1]] = part
        pools.append(pool)
    return layout, pools


def call(
    step: PackedStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    module: nn.Module | None = None,
    shapes: Shapes | None = None,
    **arguments: Any,
) -> Tensor:
    model: Any = SimpleNamespace(config=LlamaConfig())
    mask = arguments.pop("attention_mask", None)
    layout, pools = in_blocks(step, key, value)
    with packed_attention(model, layout, shapes):
        out, weights = packed_attention_forward(module or nn.Module(), query, *pools, mask, **arguments)
    assert weights is None
    return out


def attend_by_definition(case: Case) -> Tensor:
    """For each token and head: cap, mask and weigh the scores of the slots that it sees."""
    query, key, value, sinks = case.tensors()
    scale = case.scaling if case.scaling is not None else 1 / math.sqrt(case.key_size)
    out = query.new_zeros(1, query.shape[2], query.shape[1], case.value_size)
    places = [
        (row, length + offset)
        for row, (length, new) in enumerate(zip(case.lengths, case.num_new, strict=True))
        for offset in range(new)
    ]
    for place, (row, position) in enumerate(places):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        for head in range(query.shape[1]):
            kv_head = head // case.groups
            scores = key[row, kv_head, first : position + 1] @ query[0, head, place] * scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].exp())
            out[0, place, head] = weights / total @ value[row, kv_head, first : position + 1]
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 4))
    num_new = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows).filter(any))
    return Case(
        lengths=draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)),
        num_new=num_new,
        kv_heads=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        key_size=draw(st.sampled_from([2, 6])),
        value_size=draw(st.sampled_from([2, 5])),
        window=draw(st.none() | st.integers(1, 8)),
        softcap=draw(st.none() | st.just(1.5)),
        has_sinks=draw(st.booleans()),
        scaling=draw(st.none() | st.just(0.3)),
        seed=draw(st.integers(0, 1000)),
    )


@given(cases(), st.sampled_from([None, Shapes((), 1, 1), Shapes((), 5, 4)]))
@settings(max_examples=200, deadline=None)
def test_equals_a_loop_over_tokens_and_heads(case: Case, shapes: Shapes | None):
    out = attend(case, shapes=shapes)
    torch.testing.assert_close(out, attend_by_definition(case), rtol=1e-10, atol=1e-12)


@given(cases(), st.sampled_from([Shapes((), 1, 1), Shapes((), 5, 4)]))
@settings(max_examples=60, deadline=None)
def test_drafts_that_are_a_part_of_their_own_get_the_same(case: Case, shapes: Shapes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_step, "READ_COST", -100)
        patch.setattr(block_step, "PART_COST", 0)
        assert (len(in_blocks(case.step)[0].parts) == 2) == (max(case.num_new) > 1)
        out = attend(case, shapes=shapes)
    torch.testing.assert_close(out, attend_by_definition(case), rtol=1e-10, atol=1e-12)


@given(cases())
@settings(max_examples=30, deadline=None)
def test_rows_that_are_no_neighbours_attend_as_well(case: Case):
    rows = [3 * place + 1 for place in range(len(case.lengths))][::-1]
    query, key, value, sinks = case.tensors()
    step = pack(case.lengths, case.num_new, rows=rows)
    out = call(
        step,
        query,
        key,
        value,
        s_aux=sinks,
        scaling=case.scaling,
        sliding_window=case.window,
        softcap=case.softcap,
    )
    torch.testing.assert_close(out, attend_by_definition(case), rtol=1e-10, atol=1e-12)


PLAIN = Case([5, 0, 9], [3, 1, 2])
VARIANTS = {
    "plain": PLAIN,
    "window": Case([5, 0, 9], [3, 1, 2], window=4),
    "softcap": Case([5, 0, 9], [3, 1, 2], softcap=2.0),
    "sinks": Case([5, 0, 9], [3, 1, 2], has_sinks=True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_a_part_of_their_own_changes_no_bit_of_drafts(case: Case, dtype: torch.dtype, monkeypatch):
    query, key, value, sinks = (
        None if tensor is None else tensor.to(dtype)
        for tensor in replace(case, key_size=8, value_size=8).tensors()
    )
    rules = {"s_aux": sinks, "sliding_window": case.window, "softcap": case.softcap, "shapes": Shapes((), 16, 16)}
    monkeypatch.setattr(block_step, "READ_COST", 0)
    outs = []
    for cost in (1 << 20, -1):
        monkeypatch.setattr(block_step, "PART_COST", cost)
        outs.append(call(case.step, query, key, value, **rules))
    assert torch.equal(*outs)


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_stale_slots_change_no_bit(case: Case):
    assert torch.equal(attend(case, stale=0.0), attend(case, stale=1e4))


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_and_single_precision_are_finite_and_near(case: Case, dtype: torch.dtype):
    query, key, value, sinks = (None if t is None else t.to(dtype) for t in case.tensors(stale=0.0))
    out = call(case.step, query, key, value, s_aux=sinks, sliding_window=case.window, softcap=case.softcap)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), attend_by_definition(case), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_of_one_block_gets_the_same_bits_beside_rows_of_more(dtype: torch.dtype):
    """The share of an only block is 1, and left out where all rows have one."""
    query, key, value, _ = (None if t is None else t.to(dtype) for t in Case([2, 9, 3], [1, 1, 1]).tensors())
    together = call(pack([2, 9, 3], [1, 1, 1]), query, key, value)
    for row, length in ((0, 2), (2, 3)):
        own = (store[row : row + 1, :, : length + 1] for store in (key, value))
        alone = call(pack([length], [1]), query[:, :, row : row + 1], *own, shapes=Shapes((1, 2), 1, 1))
        assert torch.equal(alone[0, 0], together[0, row])


def test_a_row_without_new_tokens_takes_no_part():
    with_idle = Case([5, 7, 9], [3, 0, 2])
    query, key, value, _ = with_idle.tensors()
    without = call(pack([5, 9], [3, 2]), query, key[[0, 2]], value[[0, 2]])
    torch.testing.assert_close(attend(with_idle), without, rtol=1e-12, atol=1e-12)


def test_output_is_contiguous():
    # Some models (afmoe) view it. One row, one token and a full grid each skip a copy that would make it so.
    for lengths, num_new in ([5], [1]), ([5], [4]), ([5, 2], [1, 1]), ([5, 2], [2, 2]), ([5, 2], [2, 1]):
        assert attend(Case(lengths, num_new)).is_contiguous()


def test_window_zero_is_no_window():
    assert torch.equal(attend(PLAIN, sliding_window=0), attend(PLAIN))


def layer_of(kind: type[nn.Module], config: Any, layer: int) -> nn.Module:
    return kind(config, layer_idx=layer)


def attend_in(module: nn.Module) -> Tensor:
    """Attend as `module` does if it passes no window."""
    query, key, value, _ = PLAIN.tensors()
    return call(PLAIN.step, query, key, value, module=module)


WINDOWED = attend_by_definition(Case([5, 0, 9], [3, 1, 2], window=4))
FULL = attend_by_definition(PLAIN)
TINY = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4}


def test_window_comes_from_the_layer_type_where_the_layer_passes_none():
    config = Qwen2MoeConfig(**TINY, use_sliding_window=True, num_hidden_layers=2, max_window_layers=2)
    expected = {"sliding_attention": WINDOWED, "full_attention": FULL}
    assert set(config.layer_types) == set(expected)
    for layer, kind in enumerate(config.layer_types):
        out = attend_in(layer_of(qwen2_moe.Qwen2MoeAttention, config, layer))
        torch.testing.assert_close(out, expected[kind])


def test_window_comes_from_the_config_where_there_are_no_layer_types():
    for window, expected in ((4, WINDOWED), (None, FULL), (0, FULL)):
        config = PhimoeConfig(**{**TINY, "sliding_window": window})
        torch.testing.assert_close(attend_in(layer_of(phimoe.PhimoeAttention, config, 0)), expected)


def test_window_of_a_subclass_in_another_file_is_found():
    class Custom(phimoe.PhimoeAttention):
        pass

    torch.testing.assert_close(attend_in(layer_of(Custom, PhimoeConfig(**TINY), 0)), WINDOWED)


def test_window_that_a_model_carries_and_never_reads_is_none():
    torch.testing.assert_close(attend_in(layer_of(llama.LlamaAttention, LlamaConfig(**TINY), 0)), FULL)


def test_window_passed_by_the_layer_outweighs_the_config():
    module = layer_of(phimoe.PhimoeAttention, PhimoeConfig(**TINY), 0)
    query, key, value, _ = PLAIN.tensors()
    torch.testing.assert_close(call(PLAIN.step, query, key, value, module=module, sliding_window=None), FULL)


@pytest.mark.parametrize("name", ["position_bias", "indices", "attention_chunk_size", "never_heard_of"])
def test_arguments_that_may_change_the_result_are_refused(name: str):
    with pytest.raises(ValueError, match=f"does not know {name}, which Module passes"):
        attend(PLAIN, **{name: torch.ones(1)})
    attend(PLAIN, **{name: None})


def test_arguments_without_effect_are_taken():
    out = attend(PLAIN, dropout=0.0, use_cache=True, position_ids=PLAIN.step.slots, output_attentions=False)
    assert torch.equal(out, attend(PLAIN))


def test_a_mask_of_the_models_own_is_refused():
    with pytest.raises(ValueError, match="derives its own mask, and Module passes one"):
        attend(PLAIN, attention_mask=torch.zeros(1, 1, 6, 11))


def test_attention_that_is_not_causal_is_refused():
    module = nn.Module()
    module.is_causal = False
    query, key, value, _ = PLAIN.tensors()
    with pytest.raises(ValueError, match="is causal, and Module is not"):
        call(PLAIN.step, query, key, value, module=module)
    with pytest.raises(ValueError, match="is causal, and Module is not"):
        attend(PLAIN, is_causal=False)
    call(PLAIN.step, query, key, value, module=module, is_causal=True)


def test_model_gets_its_own_attention_back_sub_models_too():
    config = LlavaConfig(text_config=LlamaConfig(), vision_config=CLIPVisionConfig())
    config._attn_implementation = "sdpa"
    config.vision_config._attn_implementation = "eager"
    model: Any = SimpleNamespace(config=config)
    with packed_attention(model, in_blocks(PLAIN.step)[0]):
        assert config._attn_implementation == config.text_config._attn_implementation == NAME
    assert (config._attn_implementation, config.text_config._attn_implementation) == ("sdpa", "sdpa")
    assert config.vision_config._attn_implementation == "eager"


def test_model_gets_its_own_attention_back_after_an_error():
    model: Any = SimpleNamespace(config=LlamaConfig())
    before = model.config._attn_implementation
    with pytest.raises(KeyError), packed_attention(model, in_blocks(PLAIN.step)[0]):
        raise KeyError
    assert model.config._attn_implementation == before
