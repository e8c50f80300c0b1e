"""Text in, text out, on a toy llama over bytes: the same request gives the same output, field by field."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from greedy import greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_folders import VOCABULARY, save_text_llama, text_llama
from toy_text import byte_tokenizer

from batchspec import LLM

MODEL = text_llama(seed=1)
TOKENIZER = byte_tokenizer()
DRAFTING = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "itself": {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3},
    "unrelated": {"method": "draft_model", "model": text_llama(seed=2), "num_speculative_tokens": 2},
}


def make_llm(name="none", max_num_seqs=3, **changes):
    return LLM(MODEL, tokenizer=TOKENIZER, speculative_config=DRAFTING[name], max_num_seqs=max_num_seqs, **changes)


@pytest.fixture(scope="module")
def llms():
    return {name: make_llm(name) for name in DRAFTING}


@pytest.fixture(scope="module")
def padded_llms():
    names = ("none", "ngram", "itself", "unrelated")
    return [make_llm(name, strategy=strategy) for strategy in ("eqspec", "exspec") for name in names]


def without_metrics(outputs):
    return [dataclasses.replace(output, metrics=None) for output in outputs]


params = st.builds(
    greedy,
    max_tokens=st.integers(8, 24),
    min_tokens=st.integers(0, 8),
    stop=st.lists(st.text("aeinrst .", min_size=1, max_size=2), max_size=3),
    stop_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(st.tuples(st.text("ab <\n", min_size=1, max_size=12), params), min_size=1, max_size=6))
def test_neither_speculation_nor_strategy_changes_a_field_of_any_output(llms, padded_llms, requests):
    prompts, sampling = map(list, zip(*requests, strict=True))
    reference = without_metrics(llms["none"].generate(prompts, sampling, use_tqdm=False))
    for llm in [llms["ngram"], llms["itself"], llms["unrelated"], *padded_llms]:
        assert without_metrics(llm.generate(prompts, sampling, use_tqdm=False)) == reference


@pytest.fixture(scope="module")
def long_text(llms):
    return llms["none"].generate("Once", greedy(max_tokens=60), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stop_string_ends_text_tokens_and_counts_at_the_same_place(llms, long_text, name, size):
    """Any piece of the text as the stop string, so that it ends inside, at the end of, and across blocks."""
    for start in range(4, 30, 5):
        stop = long_text.text[start : start + size]
        end = long_text.text.find(stop)
        output = llms[name].generate("Once", greedy(max_tokens=60, stop=stop), use_tqdm=False)[0]
        completion = output.outputs[0]
        assert completion.text == long_text.text[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == long_text.token_ids[: len(completion.token_ids)]
        assert TOKENIZER.decode(completion.token_ids).endswith(stop)
        assert output.metrics.num_output_tokens == len(completion.token_ids)


def test_outputs_come_in_the_order_of_the_prompts(llms):
    prompts = ["long " * 6, "x", "middle " * 3, "yy", "z"]
    sampling = [greedy(max_tokens=n, ignore_eos=True) for n in (3, 30, 7, 1, 12)]
    outputs = llms["ngram"].generate(prompts, sampling, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 30, 7, 1, 12]


def test_prompts_of_like_length_are_run_together_longest_first(monkeypatch):
    llm, lengths = make_llm(max_num_seqs=2), []
    prefill = llm.engine.runner.prefill
    monkeypatch.setattr(
        llm.engine.runner,
        "prefill",
        lambda row, tokens, start, read: lengths.append(len(tokens)) or prefill(row, tokens),
    )
    prompts = [[1] * length for length in (5, 30, 3, 29, 4)]
    outputs = llm.generate(prompts, greedy(max_tokens=3), use_tqdm=False)
    assert lengths == [29, 28, 4, 3, 2]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_one_prompt_many_prompts_token_ids_and_dictionaries_are_understood(llms):
    llm, short = llms["none"], greedy(max_tokens=5)
    ids = TOKENIZER("hello").input_ids
    reference = llm.generate("hello", short, use_tqdm=False)
    assert len(reference) == 1
    for prompts in (["hello"], ids, [ids], {"prompt": "hello"}, [{"prompt_token_ids": ids}]):
        outputs = llm.generate(prompts, short, use_tqdm=False)
        assert [output.outputs[0] for output in outputs] == [reference[0].outputs[0]]
    assert llm.generate([], short, use_tqdm=False) == []


def test_chat_takes_one_conversation_or_many(llms):
    conversation = [{"role": "user", "content": "hi"}]
    short = greedy(max_tokens=4)
    one = llms["none"].chat(conversation, short, use_tqdm=False)
    two = llms["none"].chat([conversation, conversation], short, use_tqdm=False)
    assert one[0].prompt == "<user>hi\n<assistant>"
    assert [output.outputs[0] for output in two] == [one[0].outputs[0]] * 2


def test_without_a_tokenizer_token_ids_go_in_and_out():
    llm = LLM(MODEL, skip_tokenizer_init=True)
    output = llm.generate([[5, 6, 7]], greedy(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (4, "")
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        llm.generate("text")
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        llm.generate([[5]], greedy(stop="x"))
    with pytest.raises(ValueError, match="messages needs a tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("strategy", ["eqspec", "exspec"])
def test_padded_strategies_share_a_model_with_packed_ones_in_other_threads(llms, strategy):
    """A packed step switches the model's attention for its time; a padded one must not run in between."""
    pair = make_llm("itself", strategy=strategy), make_llm("ngram")
    prompts = [f"{letter} once upon a time" for letter in "abcdefgh"]
    sampling = greedy(max_tokens=30, ignore_eos=True)
    wanted = [output.outputs[0].token_ids for output in llms["none"].generate(prompts, sampling, use_tqdm=False)]
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(llm.generate, prompts, sampling, use_tqdm=False) for llm in pair]
        for run in runs:
            assert [output.outputs[0].token_ids for output in run.result()] == wanted


def test_an_llm_is_made_while_another_one_generates_on_the_same_model(llms):
    """Its trial steps have to wait for the packed steps of the other, which switch the model's attention."""
    sampling = greedy(max_tokens=60, ignore_eos=True)
    with ThreadPoolExecutor(1) as thread:
        for strategy in ("packed", "eqspec", "exspec") * 2:
            run = thread.submit(make_llm("ngram").generate, ["once upon a time"] * 3, sampling, use_tqdm=False)
            while not run.done():
                make_llm(strategy=strategy)
            run.result()


def test_stream_gives_growing_snapshots_and_the_same_end(llms):
    sampling = greedy(max_tokens=20, stop="qqq")
    texts, last = {}, {}
    for output in llms["itself"].stream(["ab", "cd"], sampling):
        text = output.outputs[0].text
        assert text.startswith(texts.get(output.request_id, ""))
        texts[output.request_id], last[output.request_id] = text, output
    wanted = llms["none"].generate(["ab", "cd"], sampling, use_tqdm=False)
    assert without_metrics([last["0"], last["1"]]) == without_metrics(wanted)


def test_a_stream_that_is_closed_leaves_the_llm_free(llms):
    stream = llms["ngram"].stream(["ab"] * 5, greedy(max_tokens=20))
    next(stream)
    with pytest.raises(RuntimeError, match="already generating"):
        llms["ngram"].generate("ab", use_tqdm=False)
    with pytest.raises(RuntimeError, match="already generating"):
        next(llms["ngram"].stream("ab"))
    stream.close()
    assert not llms["ngram"].engine.has_unfinished_requests()
    assert len(llms["ngram"].generate(["ab"], use_tqdm=False)) == 1


def test_a_request_that_is_aborted_during_a_stream_is_given_out_and_the_others_run():
    llm, finished = make_llm("ngram", max_num_seqs=1), {}
    for output in llm.stream(["ab", "cd", "ef"], greedy(max_tokens=6, ignore_eos=True)):
        if output.request_id == "0" and not output.finished:
            llm.engine.abort_request("0")
        if output.finished:
            finished[output.request_id] = output.outputs[0]
    assert [finished[name].finish_reason for name in "012"] == ["abort", "length", "length"]
    assert 0 < len(finished["0"].token_ids) < 6


def test_a_request_of_one_s_own_in_the_engine_is_not_mixed_into_a_run():
    llm = make_llm()
    llm.engine.add_request("mine", [5, 6], greedy(max_tokens=2))
    with pytest.raises(RuntimeError, match="already generating"):
        llm.generate("ab", use_tqdm=False)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert len(llm.generate("ab", use_tqdm=False)) == 1


def test_rows_that_a_drafter_never_saw_can_be_released():
    """With a budget of one token nothing is drafted, so the draft model's cache never gets those rows."""
    llm = make_llm("unrelated")
    llm.generate("ab", greedy(max_tokens=8), use_tqdm=False)
    assert len(llm.generate(["ab", "cd", "ef"], greedy(max_tokens=1), use_tqdm=False)) == 3


def test_an_error_in_the_model_is_told_as_it_is_and_the_llm_goes_on():
    llm = LLM(text_llama(seed=1), tokenizer=TOKENIZER, max_num_seqs=3)
    wanted = llm.generate(["ab"], greedy(), use_tqdm=False)[0].outputs

    def fail(*arguments):
        raise MemoryError

    hook = llm.model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        llm.generate(["ab", "cd", "ef"], use_tqdm=False)
    hook.remove()
    assert llm.generate(["ab"], greedy(), use_tqdm=False)[0].outputs == wanted


def test_a_model_in_train_mode_is_refused():
    llm = LLM(text_llama(seed=1), tokenizer=TOKENIZER)
    llm.model.train()
    with pytest.raises(RuntimeError, match=r"the model is in train mode, .*; call model.eval\(\)"):
        llm.generate("ab", use_tqdm=False)


def test_a_model_that_was_changed_or_is_under_autocast_is_refused():
    llm = LLM(text_llama(seed=1).float(), tokenizer=TOKENIZER)
    llm.generate("ab", use_tqdm=False)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"the cache holds torch\.float32"),
    ):
        llm.generate("ab", use_tqdm=False)


def test_two_llms_on_one_model_in_two_threads_take_turns():
    model = text_llama(seed=1)
    llms = [LLM(model, tokenizer=TOKENIZER, max_num_seqs=2) for _ in range(2)]
    prompts = ["ab", "cde", "f", "ghij"] * 3
    wanted = [output.outputs for output in llms[0].generate(prompts, greedy(), use_tqdm=False)]
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda llm: llm.generate(prompts, greedy(), use_tqdm=False), llms))
    assert [[output.outputs for output in run] for run in runs] == [wanted, wanted]
    assert model.config._attn_implementation == text_llama().config._attn_implementation


def test_a_generation_config_that_changes_greedy_decoding_is_told():
    model = text_llama(seed=1)
    model.generation_config.repetition_penalty = 1.1
    with pytest.warns(UserWarning, match="sets repetition_penalty=1.1, which transformers' generate applies"):
        LLM(model, tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("a", {"max_tokens": 3}, "sampling_params must be SamplingParams, got {'max_tokens': 3}"),
        (["a\ud800"], None, "prompt 0: prompt must be valid Unicode text"),
        ([{"prompt_token_ids": 5}], None, "prompt 0: prompt must be text or a list of token ids, got int"),
        (iter("ab"), None, "prompts must be text, token ids or a list of them, got str_ascii_iterator"),
        (["a", ""], None, "prompt 1: prompt must not be empty: this model has no BOS token"),
        (["a" * 256], None, "prompt 0: prompt must have at most 255 tokens"),
        ([[1, 300]], None, "prompt 0: prompt must hold token ids from 0 to 257"),
        ([3.5], None, "prompt 0: prompt must be text or a list of token ids, got float"),
        ([{"text": "a"}], None, "prompt 0: prompt must have the key 'prompt' or 'prompt_token_ids'"),
        (["a", "b"], [greedy()], r"sampling_params must be one or as many as prompts \(2\), got 1"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_and_none_is_run(llms, prompts, sampling, message):
    steps = llms["none"].engine.stats.num_steps
    with pytest.raises(ValueError, match=message):
        llms["none"].generate(prompts, sampling)
    assert llms["none"].engine.stats.num_steps == steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 257}, "max_model_len must be at most 256, the model's context window, got 257"),
        ({"max_model_len": 1}, "max_model_len must be an integer of at least 2"),
        ({"strategy": "magic"}, "strategy must be one of packed"),
        ({"device": "meta"}, "device must be auto or cpu for a loaded model, got 'meta'"),
        ({"device": "tpu9"}, "device must be auto, cpu, or a device that this machine has"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 2"),
        ({"speculative_config": "ngram"}, "speculative_config must be a dictionary or None, got 'ngram'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"dtype": "float32"}, "dtype must be auto or torch.float64 for a loaded model"),
        ({"speculative_config": {"method": "magic"}}, "method must be one of"),
        ({"tokenizer": None}, "tokenizer must be given with a loaded model"),
        ({"tokenizer": "/no/such/folder"}, "there is no folder '/no/such/folder'"),
        ({"prepack": 7}, "prepack must be True or False, got 7"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(MODEL, **{"tokenizer": TOKENIZER, **settings})


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize(("window", "num_drafts"), [(2, 8), (5, 8), (8, 8), (256, 300)])
def test_drafts_that_are_longer_than_the_window_are_cut_to_it(window, num_drafts, numerics):
    for adaptive in (True, False):
        speculation = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": adaptive}
        limits = {"max_num_seqs": 3, "max_model_len": window, "numerics": numerics}
        llms = [LLM(MODEL, tokenizer=TOKENIZER, speculative_config=one, **limits) for one in (speculation, None)]
        with_drafts, without = (llm.generate([[1]] * 4, greedy(max_tokens=20), use_tqdm=False) for llm in llms)
        assert [output.outputs[0].token_ids for output in with_drafts] == [
            output.outputs[0].token_ids for output in without
        ]


def test_a_missing_model_is_named():
    with pytest.raises(ValueError, match="there is no folder '/no/such/model'"):
        LLM("/no/such/model")


def test_a_tokenizer_without_a_template_cannot_chat():
    llm = LLM(MODEL, tokenizer=byte_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="has none; use generate"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_models_and_draft_models_are_loaded_from_folders(tmp_path, llms):
    target = save_text_llama(tmp_path / "target", seed=1)
    draft = save_text_llama(tmp_path / "draft", seed=1)
    llm = LLM(str(target), speculative_config={"method": "draft_model", "model": str(draft)})
    output = llm.generate("Once", greedy(max_tokens=20), use_tqdm=False)[0]
    wanted = llms["none"].generate("Once", greedy(max_tokens=20), use_tqdm=False)[0]
    assert output.outputs == wanted.outputs
    assert output.metrics.acceptance_rate > 0.9


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path):
    draft = save_text_llama(tmp_path / "draft", seed=1)
    other = byte_tokenizer()
    other.add_tokens(["extra"])
    with pytest.raises(ValueError, match=r"'extra' is 258 in the target's and missing in the draft model's"):
        LLM(
            _with_vocabulary(259),
            tokenizer=other,
            speculative_config={"method": "draft_model", "model": str(_with_vocabulary(300, draft))},
        )


def test_vocabularies_padded_to_different_sizes_draft_together():
    llm = LLM(
        MODEL,
        tokenizer=TOKENIZER,
        speculative_config={"method": "draft_model", "model": _with_vocabulary(320), "num_speculative_tokens": 3},
    )
    outputs = llm.generate(["ab", "c"], greedy(max_tokens=12), use_tqdm=False)
    wanted = make_llm().generate(["ab", "c"], greedy(max_tokens=12), use_tqdm=False)
    assert without_metrics(outputs) == without_metrics(wanted)


def _with_vocabulary(size, folder=None):
    """The toy model with a vocabulary padded to `size`; saved over `folder` if one is given."""
    model = text_llama(seed=1)
    model.resize_token_embeddings(size, mean_resizing=False)
    if folder is None:
        return model
    model.save_pretrained(folder)
    return folder
