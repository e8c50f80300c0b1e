import pytest

from batchspec.config import EngineConfig, SpeculativeConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "speculative_config needs the key 'method': one of draft_model, ngram"),
        ({"method": "medusa"}, "method must be one of draft_model, ngram, got 'medusa'"),
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
        ({"method": "draft_model"}, "model must be given for method draft_model"),
        ({"method": "ngram", "model": "x"}, "model must not be given for method ngram"),
    ],
)
def test_a_wrong_drafting_setting_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2"),
        ({"max_model_len": 8, "max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 8, "max_num_seqs": True}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 8, "strategy": "eqspec"}, "strategy must be one of packed, got 'eqspec'"),
    ],
)
def test_a_wrong_engine_setting_is_named_with_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)
