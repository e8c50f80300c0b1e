import pytest

from batchspec.audit.spec import parse_spec
from batchspec.settings import llm_settings


def test_a_spec_is_a_kind_and_its_settings():
    spec = parse_spec("batchspec:strategy=exspec,method=ngram,num_speculative_tokens=3,refill=false,window=8")
    assert spec.kind == "batchspec"
    assert llm_settings(spec.options) == {
        "strategy": "exspec",
        "refill": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "pool_config": {"window": 8},
    }
    assert parse_spec("transformers").options == {}
    assert parse_spec("transformers-assisted:model=a/b=c").options == {"model": "a/b=c"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("openai:http://localhost:8000,model=m", "http://localhost:8000/v1"),
        ("openai:http://localhost:8000/v1/,model=m", "http://localhost:8000/v1"),
        ("openai:https://host/api/v1/completions,model=m", "https://host/api/v1"),
    ],
)
def test_a_server_is_named_by_its_url(text, url):
    assert parse_spec(text).options["url"] == url


def test_a_key_is_not_shown():
    with pytest.raises(ValueError, match="keys are model, timeout, prompt"):  # which would stand in the report
        parse_spec("openai:http://h,model=m,api_key=geheim")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm:model=x", "must begin with one of batchspec, transformers, transformers-assisted, openai"),
        ("batchspec:speed=9", "'speed=9' must be key=value, once each; keys are max_model_len, strategy, "),
        ("batchspec:method", "'method' must be key=value"),
        ("batchspec:dtype=float16", "'dtype=float16' must be key=value"),
        ("batchspec:method=ngram,method=ngram", "once each"),
        ("transformers:x=1", "keys are none"),
        ("openai:localhost,model=m", "must name a URL"),
        ("openai:", "must name a URL"),
        ("openai:http://localhost:8000", "must name the server's model"),
        ("openai:http://h,model=m,prompt=audio", "prompt must be ids or text"),
        ("openai:http://h,model=m,timeout=soon", "timeout a number of seconds"),
    ],
)
def test_a_bad_spec_is_refused_in_one_sentence(text, message):
    with pytest.raises(ValueError, match="--candidate") as raised:
        parse_spec(text)
    assert message in str(raised.value)


def test_speculation_needs_a_method_and_good_values():
    with pytest.raises(ValueError, match="needs the key 'method'"):
        llm_settings({"num_speculative_tokens": 4})
    with pytest.raises(ValueError, match="num_speculative_tokens must be"):
        llm_settings({"method": "ngram", "num_speculative_tokens": 0})
