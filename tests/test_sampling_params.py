"""Every field: its default, and what it refuses in which words."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import SamplingParams
from batchspec.sampling_params import GRAMMAR_KINDS

VLLM_DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
}
LISTS = ("bad_words", "allowed_token_ids", "stop", "stop_token_ids", "logits_processors")
FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
INTEGERS = {  # field: lowest, highest
    "n": (1, None),
    "top_k": (-1, None),
    "seed": (-(2**63), 2**64 - 1),
    "min_tokens": (0, None),
    "logprobs": (-1, None),
    "prompt_logprobs": (-1, None),
}
NUMBERS = {  # field: lowest, highest, is the lowest allowed?
    "temperature": (0.0, 1e6, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (1e-6, 1e6, True),
}
NEITHER = [True, False, "1", [1], (), {}, object()]
"""No number of any kind."""


def refused(field, value, message=""):
    with pytest.raises(ValueError, match=rf"{field} must .*{message}"):
        SamplingParams(**{field: value})


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert not any(getattr(params, name) for name in LISTS)
    assert {field.name for field in dataclasses.fields(params)} == {*VLLM_DEFAULTS, *LISTS}


@pytest.mark.parametrize("value", [*NEITHER, 1.0, 2.5, math.nan, math.inf])
@pytest.mark.parametrize("field", INTEGERS)
def test_an_integer_field_refuses_what_is_none(field, value):
    refused(field, value, "be an integer (of at least|from) ")


@pytest.mark.parametrize("value", [*NEITHER, None, math.nan, math.inf, -math.inf, 1j])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_field_refuses_what_is_none_or_not_finite(field, value):
    refused(field, value, "be a number (of at least|above) ")


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens"])
def test_an_integer_field_that_has_a_default_refuses_none(field):
    refused(field, None, "got None")


@pytest.mark.parametrize(("field", "low", "high"), [(field, *limits) for field, limits in INTEGERS.items()])
def test_an_integer_is_allowed_from_its_lowest_to_its_highest_and_not_beyond(field, low, high):
    assert getattr(SamplingParams(**{field: low}), field) == low
    allowed = (
        f"an integer of at least {low}" if high is None else r"an integer from -2\*\*63 to 2\*\*64 - 1 or None"
    )
    refused(field, low - 1, f"{allowed}, got {low - 1}")
    if high is not None:
        assert getattr(SamplingParams(**{field: high}), field) == high
        refused(field, high + 1, f"{allowed}, got {high + 1}")


@pytest.mark.parametrize(("field", "low", "high", "closed"), [(field, *how) for field, how in NUMBERS.items()])
def test_a_number_is_allowed_from_its_lowest_to_its_highest_and_not_beyond(field, low, high, closed):
    allowed = f"a number of at least {low}" if closed else f"a number above {low}"
    refused(field, low - 0.001, allowed)
    refused(field, math.nextafter(low, -math.inf), allowed)
    if closed:
        assert getattr(SamplingParams(**{field: low}), field) == low
    else:
        refused(field, low, f"{allowed}.*, got {low}")
    if high is not None:
        assert getattr(SamplingParams(**{field: high}), field) == high
        refused(field, math.nextafter(high, math.inf), f"at most {high}, got")


@pytest.mark.parametrize("field", NUMBERS)
def test_a_whole_number_is_a_number(field):
    assert getattr(SamplingParams(**{field: 1}), field) == 1


@pytest.mark.parametrize("value", [*NEITHER, 0, -1, 1.5, math.nan])
def test_max_tokens_is_at_least_one_or_none(value):
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(max_tokens=1).max_tokens == 1
    refused("max_tokens", value, "be an integer of at least 1 or None, got ")


def test_min_tokens_is_at_most_max_tokens():
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(8\), got 9"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_the_seed_minus_one_is_none_and_others_are_kept():
    assert SamplingParams(seed=-1).seed is None
    assert [SamplingParams(seed=seed).seed for seed in (0, -2, 7)] == [0, -2, 7]


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_many_answers_at_temperature_zero_are_refused(temperature):
    assert SamplingParams(n=1, temperature=temperature).is_greedy
    with pytest.raises(ValueError, match=r"n must be 1 with temperature 0, .*, got 2"):
        SamplingParams(n=2, temperature=temperature)
    assert SamplingParams(n=2, temperature=1e-5).n == 2


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [None, 0, 1, "yes", 1.0, []])
def test_a_switch_is_true_or_false(field, value):
    refused(field, value, "be True or False, got ")


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [[-1], ["x"], "x", [1.0], [True], [None], [[1]], 1.5, True])
def test_token_ids_are_whole_numbers_from_zero_on(field, value):
    refused(field, value, r"be a list of token ids \(0 or more\), got ")


@pytest.mark.parametrize("value", [[""], "", [3], 3, ["a", ""], [None], ["a", b"b"], b"a"])
def test_stop_strings_are_strings_and_not_empty(value):
    refused("stop", value, "be a non-empty string or a list of them, got ")


@pytest.mark.parametrize(
    "value",
    ["", [""], [" "], ["a", ""], [[]], ["a", []], [[-1]], [[1.5]], [[True]], [["a"]], [7], 7, [None], [{1: 2}]],
)
def test_bad_words_are_words_or_lists_of_token_ids_and_none_is_empty(value):
    refused("bad_words", value, "be words or token id lists, none empty, got ")


@pytest.mark.parametrize("value", [["x"], "x", [3], 3, [len, None]])
def test_logits_processors_are_functions(value):
    refused("logits_processors", value, "be a list of functions, got ")


@pytest.mark.parametrize("value", [{-1: 1.0}, {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, [(1, 1.0)], [1], 5, "x"])
def test_a_logit_bias_is_of_token_ids(value):
    refused("logit_bias", value, r"map token ids \(0 or more\) to numbers, got ")


@pytest.mark.parametrize("value", [*NEITHER, None, math.nan, math.inf, 100.1, -101])
def test_a_logit_bias_is_a_number_from_minus_to_plus_100(value):
    assert SamplingParams(logit_bias={0: -100, 9: 100.0}).logit_bias == {0: -100, 9: 100.0}
    with pytest.raises(
        ValueError, match=r"logit_bias of token 9 must be a number of at least -100.0 and at most 100"
    ):
        SamplingParams(logit_bias={0: 1.0, 9: value})


ALL_KINDS = ", ".join(GRAMMAR_KINDS)


@pytest.mark.parametrize(
    "value",
    [{}, {"json": {}, "regex": "a"}, {"xml": "a"}, {None: "a"}, "json", ["json"], 3, True],
)
def test_structured_outputs_have_exactly_one_known_key(value):
    refused("structured_outputs", value, f"have exactly one of {ALL_KINDS}, got ")


@pytest.mark.parametrize(
    ("kind", "value", "allowed"),
    [
        *(("json", value, "a schema, as a dictionary or text") for value in (None, 3, True, ["a"], b"{}")),
        *(("regex", value, "a string") for value in (None, 3, ["a"], {"a": 1}, b"a")),
        *(("grammar", value, "a string") for value in (None, 3, ["a"], {"a": 1})),
        *(
            ("choice", value, "a list of non-empty strings")
            for value in (None, "a", [], [""], ["a", ""], ["a", 3], {"a": 1}, 3)
        ),
    ],
)
def test_the_value_of_structured_outputs_fits_its_key(kind, value, allowed):
    with pytest.raises(ValueError, match=f"structured_outputs {kind} must be {allowed}, got "):
        SamplingParams(structured_outputs={kind: value})


def test_structured_outputs_and_min_tokens_exclude_each_other():
    with pytest.raises(ValueError, match="min_tokens must be 0 with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, min_tokens=1)


def test_one_of_a_list_is_a_list_of_one_and_none_is_none():
    params = SamplingParams(
        stop="END", stop_token_ids=5, allowed_token_ids=6, bad_words="no", logits_processors=len
    )
    assert (params.stop_strings, params.stop_ids, params.allowed_ids) == (("END",), (5,), (6,))
    assert (params.bad_words, params.logits_processors) == (("no",), (len,))
    assert SamplingParams(stop_token_ids={7}).stop_ids == (7,)
    assert SamplingParams().stop_strings == ()


def test_a_list_that_is_changed_later_changes_no_params():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_ids == (1, 2)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_alone_is_a_penalty(name):
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 0.5}).has_penalties


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.lists(st.integers(), max_size=2)), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=4)), st.one_of(st.floats(), st.text()), max_size=2),
)


@given(st.dictionaries(st.sampled_from([*VLLM_DEFAULTS, *LISTS]), anything, max_size=3))
def test_whatever_comes_is_taken_or_refused_by_the_name_of_a_field(fields):
    message = ""
    try:
        SamplingParams(**fields)
    except ValueError as error:
        message = str(error)
    assert not message or any(message.startswith(name) for name in fields)


@pytest.mark.parametrize("field", NUMBERS)
def test_an_integer_too_large_for_a_float_is_refused_like_any_other(field):
    refused(field, 10**400, "got 1000")


def test_no_allowed_token_at_all_is_refused():
    with pytest.raises(ValueError, match="allowed_token_ids must hold at least one token id; None allows all"):
        SamplingParams(allowed_token_ids=[])
