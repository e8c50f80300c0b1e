from dataclasses import replace

import pytest

from batchspec.config import EngineConfig, PoolConfig, SpeculativeConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "speculative_config needs the key 'method': one of draft_model, early_exit, ngram, suffix"),
        ({"method": "medusa"}, "method must be one of draft_model, early_exit, ngram, suffix, got 'medusa'"),
        ({"method": "ngram", "gamma": 3}, "speculative_config has no key 'gamma'; allowed are method, model"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens must be an integer of at least 1",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be an integer of at least 1"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_max must be an integer of at least 4",
        ),
        ({"method": "suffix", "suffix_min_match": 0}, "suffix_min_match must be an integer of at least 1"),
        ({"method": "suffix", "suffix_store_tokens": -1}, "suffix_store_tokens must be an integer of at least 0"),
        (
            {"method": "suffix", "suffix_store_tokens": 999},
            "suffix_store_tokens must be 0 or at least 1000, got 999",
        ),
        (
            {"method": "suffix", "suffix_store_tokens": 1000, "sampling_method": "rejection"},
            "suffix_store_tokens must be 0 with sampling_method rejection",
        ),
        ({"method": "early_exit", "num_layers": 1, "lookup": "magic"}, "lookup must be one of ngram, suffix"),
        ({"method": "ngram", "lookup": "suffix"}, "lookup must not be given for method ngram"),
        (
            {"method": "early_exit", "num_layers": 1, "lookup": "ngram", "sampling_method": "rejection"},
            "lookup must be None with sampling_method rejection",
        ),
        ({"method": "ngram", "adaptive": "yes"}, "adaptive must be True, False or None"),
        (
            {"method": "ngram", "adaptive": True, "sampling_method": "rejection"},
            "adaptive must be False or None with sampling_method rejection",
        ),
        ({"method": "ngram", "model": "x"}, "model must not be given for method ngram"),
        ({"method": "early_exit"}, "num_layers must be given for method early_exit"),
        ({"method": "early_exit", "num_layers": 0}, "num_layers must be an integer of at least 1"),
        ({"method": "ngram", "num_layers": 1}, "num_layers must not be given for method ngram"),
    ],
)
def test_a_wrong_drafting_setting_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(values)


def test_where_what_does_not_pay_is_left_out_more_is_drafted(monkeypatch):
    monkeypatch.setattr("batchspec.config.ADAPTIVE_BY_DEFAULT", True)
    adaptive = SpeculativeConfig("ngram").for_strategy("packed")
    assert (adaptive.most_draft_tokens, adaptive.shortest_lookup, adaptive.shortest_match) == (8, 1, 1)
    for fixed in (
        SpeculativeConfig("ngram", adaptive=False),
        SpeculativeConfig("ngram", sampling_method="rejection"),
        SpeculativeConfig("ngram").for_strategy("eqspec"),
    ):
        assert (fixed.most_draft_tokens, fixed.shortest_lookup, fixed.shortest_match) == (4, 2, 2)
    assert SpeculativeConfig("ngram", adaptive=False, prompt_lookup_max=1).shortest_lookup == 1


def test_what_is_asked_for_is_what_is_drafted():
    settings = {"num_speculative_tokens": 5, "prompt_lookup_min": 3, "suffix_min_match": 4}
    config = SpeculativeConfig("ngram", **settings)
    assert (config.most_draft_tokens, config.shortest_lookup, config.shortest_match) == (5, 3, 4)


def test_no_more_is_drafted_than_a_window_holds():
    long, short = SpeculativeConfig("ngram", num_speculative_tokens=500), SpeculativeConfig("ngram")
    windows = (1000, 256, 3, 2)
    assert [long.for_window(window).most_draft_tokens for window in windows] == [500, 254, 1, 1]
    assert short.for_window(256) == replace(short, num_speculative_tokens=short.most_draft_tokens)


def test_adaptive_drafting_is_refused_where_it_does_nothing():
    with pytest.raises(ValueError, match="adaptive must be False or None with strategy eqspec"):
        SpeculativeConfig("ngram", adaptive=True).for_strategy("eqspec")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2"),
        ({"max_model_len": 8, "max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 8, "max_num_seqs": True}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 8, "strategy": "x"}, "strategy must be one of packed, eqspec, exspec, got 'x'"),
        ({"max_model_len": 8, "refill": 1}, "refill must be True or False"),
        ({"max_model_len": 8, "pool": PoolConfig()}, "pool_config goes with strategy exspec, not with packed"),
        (
            {"max_model_len": 8, "strategy": "exspec", "pool": PoolConfig(window=4)},
            "window must be at least max_num",
        ),
    ],
)
def test_a_wrong_engine_setting_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"min_group": 0}, "min_group must be an integer of at least 1"),
        ({"max_wait_rounds": 0}, "max_wait_rounds must be an integer of at least 1"),
        ({"group_by": "size"}, "group_by must be one of length, acceptance, got 'size'"),
        ({"size": 8}, "pool_config has no key 'size'; allowed are window, group_by, min_group, max_wait_rounds"),
    ],
)
def test_a_wrong_pool_setting_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        PoolConfig.from_dict(values)


def test_only_exspec_has_more_rows_than_a_batch():
    rows = [EngineConfig(8, 4, strategy).num_rows for strategy in ("packed", "eqspec", "exspec")]
    assert rows == [4, 4, 16]
    assert EngineConfig(8, 4, "exspec", pool=PoolConfig(window=5)).num_rows == 5
