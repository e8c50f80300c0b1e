import math
from functools import partial

import pytest
import torch
from toy_target import make_target

from batchspec.audit.compare import precise_logits
from batchspec.audit.noise_floor import measure_noise, quantile
from batchspec.models.reference import forced_logits, generate_batch, in_float32


def measure(target, batch_size=3):
    own = partial(forced_logits, target.llm.model)
    precise = in_float32(target.llm.model)
    exact = own if precise is target.llm.model else partial(forced_logits, precise)
    return measure_noise(target, own, exact, batch_size, lambda: None)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float64, 1e-15, 1e-12),
        (torch.float32, 1e-6, 1e-3),
        (torch.float16, 1e-3, 1.0),
        (torch.bfloat16, 1e-2, 2.0),
    ],
)
def test_the_floor_is_that_of_the_dtype(dtype, low, high):
    target = make_target(dtype)
    noise = measure(target)
    assert low < noise.floor < high
    assert noise.is_batch_used
    assert noise.num_positions == sum(map(len, target.references))
    assert [len(row) for row in noise.margins] == [len(row) for row in target.references]


def test_what_batching_does_in_bfloat16_is_below_the_floor():
    """The null band's own divergences, over many prompts: all excused, and there are some."""
    texts = [
        f"{letter} {word}" for letter in "abcdefgh" for word in ("tree", "sea of", "list: 1 2", "Once more, ")
    ]
    target = make_target(torch.bfloat16, texts)
    noise = measure(target, 8)
    logits = precise_logits(partial(forced_logits, in_float32(target.llm.model)))
    differing = []
    for start in range(0, len(texts), 8):
        prompts = target.prompts[start : start + 8]
        outputs = generate_batch(target.llm.model, prompts, target.max_tokens, target.ends)
        for place, output in enumerate(outputs):
            reference = target.references[start + place]
            if output != reference:
                shared = next(
                    i for i, pair in enumerate(zip(output, reference, strict=False)) if pair[0] != pair[1]
                )
                row = logits(prompts[place], reference[:shared])
                differing.append(float(row.max() - min(row[output[shared]], row[reference[shared]])))
    assert differing
    assert max(differing) <= noise.floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_batch_does_not_raise_the_floor(dtype):
    """As if the mask of padded rows were ignored: logits of a batch that are far off."""
    target = make_target(dtype)
    sound = measure(target)
    precise = partial(forced_logits, in_float32(target.llm.model))

    def wrong(rows):
        logits = forced_logits(target.llm.model, rows)
        if len(rows) == 1:
            return logits
        return [row + 5 * torch.randn(row.shape, generator=torch.Generator().manual_seed(1)) for row in logits]

    noise = measure_noise(target, wrong, wrong if dtype == torch.float32 else precise, 3, lambda: None)
    assert not noise.is_batch_used
    assert noise.floor <= sound.floor
    assert "left out of the noise floor" in noise.remarks[0]
    assert sound.remarks == []


def spoiled(model, value):
    """Forced logits of which one in each batch is another value."""

    def forced(rows):
        logits = [row.clone() for row in forced_logits(model, rows)]
        logits[0][-1, 5] = value
        return logits

    return forced


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_target_whose_own_logits_are_no_numbers_is_refused(value):
    target = make_target(torch.float16, prompts=("The sea", "Once"), max_tokens=4)
    precise = partial(forced_logits, in_float32(target.llm.model))
    message = "the target's own logits in float16 are no numbers; audit in another dtype"
    with pytest.raises(ValueError, match=message):
        measure_noise(target, spoiled(target.llm.model, value), precise, 2, lambda: None)
    own = partial(forced_logits, target.llm.model)
    with pytest.raises(ValueError, match="own logits in float32"):
        measure_noise(target, own, spoiled(in_float32(target.llm.model), value), 2, lambda: None)


def test_a_token_that_the_target_bars_is_no_fault():
    target = make_target(torch.float32, prompts=("The sea", "Once"), max_tokens=4)
    barred = spoiled(target.llm.model, -math.inf)
    assert math.isfinite(measure_noise(target, barred, barred, 2, lambda: None).floor)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_of_no_numbers_is_infinitely_noisy(value):
    target = make_target(torch.float32, prompts=("The sea", "Once"), max_tokens=4)

    def far(rows):
        logits = forced_logits(target.llm.model, rows)
        if len(rows) == 1:
            return logits
        return [row.scatter(-1, row.argmax(-1, keepdim=True), value) for row in logits]

    noise = measure_noise(target, far, far, 2, lambda: None)
    assert noise.batched == math.inf
    assert not noise.is_batch_used
    assert math.isfinite(noise.floor)


def test_a_quantile_is_the_largest_of_few():
    assert quantile([3.0, 1.0, 2.0]) == 3.0
    assert quantile([float(value) for value in range(10_000)]) == 9990.0
    assert quantile([]) == 0.0
