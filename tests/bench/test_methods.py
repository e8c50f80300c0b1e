"""Lists of methods with settings."""

import pytest

from batchspec.bench.methods import KINDS, parse_methods
from batchspec.config import METHODS


def test_settings_belong_to_the_method_before_them():
    methods = parse_methods(["none,ngram,num_speculative_tokens=8,numerics=fast,transformers", "ngram"])
    assert [method.name for method in methods] == [
        "none", "ngram,num_speculative_tokens=8,numerics=fast", "transformers", "ngram",
    ]  # fmt: skip
    assert methods[1].settings == {
        "numerics": "fast",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 8},
    }
    assert methods[0].settings == {}


def test_every_method_of_the_library_can_be_measured():
    assert set(METHODS) < set(KINDS)


def test_a_draft_model_is_that_of_the_option_unless_the_method_names_its_own():
    texts = ["draft_model,transformers-assisted,draft_model,model=there,strategy=eqspec"]
    methods = parse_methods(texts, draft_model="here")
    assert [method.options["model"] for method in methods] == ["here", "here", "there"]


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("none", True),
        ("ngram,num_speculative_tokens=9", True),
        ("ngram,sampling_method=coupled,strategy=packed", True),
        ("ngram,sampling_method=rejection", False),
        ("ngram,numerics=fast", False),
        ("none,strategy=eqspec", False),
        ("transformers", False),
    ],
)
def test_exactness_is_asked_where_it_is_promised(text, exact):
    assert parse_methods([text])[0].has_to_be_exact == exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "--methods must be of none, "),
        ("none,", "--methods must be of none, "),
        ("none,ngram,none", "each method once, got 'none' 2 times"),
        ("ngram,gamma=4", "'gamma=4' must be key=value, once each"),
        ("ngram,method=ngram", "'method=ngram' must be key=value"),
        ("transformers,numerics=fast", "keys are none"),
        ("ngram,numerics=exact", "numerics must be one of invariant, fast"),
        ("ngram,num_speculative_tokens=0", "num_speculative_tokens must be an integer of at least 1"),
        ("early_exit", "num_layers must be given"),
        ("none,num_speculative_tokens=4", "needs the key 'method'"),
    ],
)
def test_a_bad_method_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_methods([text])
