"""Output that follows a form, whatever is drafted."""

import json
import random
import re
import sys
from dataclasses import replace

import pytest
import torch
from same import assert_same, run
from toy_folders import VOCABULARY
from toy_llm import DRAFTERS, DRAFTING, MODEL, PADDED, STRATEGIES, TOKENIZER, generate, make_llm, new_llm

from batchspec import LLM, SamplingParams
from batchspec.drafting.drafter import Draft
from batchspec.sampling.grammar import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "dark blue"]},
        "n": {"type": "integer", "minimum": -12, "maximum": 345},
        "ok": {"type": "boolean"},
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["color", "n", "ok", "digits"],
    "additionalProperties": False,
}
PAIR = {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", None]}], "minItems": 2, "maxItems": 2}
BRACKETS = 'root ::= "(" root ")" | "[" root "]" | [0-9]'


def fits_schema(text):
    value = json.loads(text)
    assert value.keys() == {"color", "n", "ok", "digits"}
    assert value["color"] in ("red", "green", "dark blue")
    assert type(value["n"]) is int
    assert -12 <= value["n"] <= 345
    assert type(value["ok"]) is bool
    assert len(value["digits"]) <= 3
    assert all(type(digit) is int and 0 <= digit <= 9 for digit in value["digits"])


def fits_pair(text):
    first, second = json.loads(text)
    assert first in (True, False)
    assert second in ("x", None)


def fits_brackets(text):
    digit = len(text) // 2
    assert text[digit].isdigit()
    mirrored = text[:digit][::-1].translate(str.maketrans("([", ")]"))
    assert text[digit + 1 :] == mirrored


ABC = TOKENIZER("abc").input_ids
CHOICES = ["yes", "no", "nobody", 'sa"y\\', "lïne\nbreak"]
FORMS = {
    "schema": ({"json": SCHEMA}, fits_schema),
    "schema text": ({"json": json.dumps(PAIR)}, fits_pair),
    "regex": ({"regex": r"[a-c]{2,5}(x|yz)[0-9]{1,3}"}, lambda text: matches(r"[a-c]{2,5}(x|yz)[0-9]{1,3}", text)),
    "choice": ({"choice": CHOICES}, lambda text: matches("|".join(map(re.escape, CHOICES)), text)),
    "grammar": ({"grammar": BRACKETS}, fits_brackets),
}


def matches(pattern, text):
    assert re.fullmatch(pattern, text)


def check_form(completion, check):
    """The whole form and then an end token; only brackets may be more than the budget holds."""
    if completion.finish_reason == "length":
        assert check is fits_brackets
        assert completion.text.startswith(("(", "["))
        return
    check(completion.text)
    assert completion.token_ids[-1] == 256


def random_request(chance):
    form = chance.choice(list(FORMS))
    greedy_ = chance.random() < 0.2
    params = SamplingParams(
        n=1 if greedy_ else chance.choice([1, 1, 2]),
        temperature=0.0 if greedy_ else chance.choice([0.5, 1.0, 2.0]),
        seed=chance.choice([None, 1, 2]),
        top_p=chance.choice([1.0, 0.7]),
        max_tokens=90,
        frequency_penalty=chance.choice([0.0, 0.5]),
        structured_outputs=FORMS[form][0],
    )
    free = SamplingParams(temperature=1.2, max_tokens=chance.randint(1, 30))
    prompt = "".join(chance.choice('ab 01{"yes') for _ in range(chance.randint(1, 15)))
    return (prompt, params, FORMS[form][1]) if chance.random() < 0.8 else (prompt, free, None)


@pytest.mark.parametrize("seed", range(100))
def test_every_output_of_a_random_schedule_follows_its_form(seed):
    """With ngram drafting, mixed forms, requests without one beside them, and any number of rows; and it is what
    comes without speculation."""
    chance = random.Random(seed)
    drawn = [random_request(chance) for _ in range(chance.randint(1, 3))]
    requests = [(prompt, params) for prompt, params, _ in drawn]
    llm = make_llm("ngram", max_num_seqs=chance.choice([1, 2, 3, 8]), strategy=chance.choice(STRATEGIES))
    outputs = run(llm, requests, chance.sample(range(len(requests)), len(requests)))
    for output, (_, _, check) in zip(outputs, drawn, strict=True):
        for completion in output.outputs if check else ():
            check_form(completion, check)
    assert_same(outputs, run(make_llm(max_num_seqs=4), requests))


def one_of_each(temperature, **fields):
    """A request for each form, whose prompts have something to draft."""
    prompts = ('{"color": "red"', "false [true", "aaab abx1 aaa", "yes yes no", "[[(1)]] ((")
    made = SamplingParams(seed=1, temperature=temperature, max_tokens=90, **fields)
    forms = [replace(made, structured_outputs=form) for form, _ in FORMS.values()]
    return list(zip(prompts, forms, strict=True))


def check_one_of_each(outputs):
    for output, (_, check) in zip(outputs, FORMS.values(), strict=True):
        for completion in output.outputs:
            check_form(completion, check)


@pytest.mark.parametrize("name", [*DRAFTING, *PADDED])
def test_each_form_is_followed_with_each_drafter_by_all_candidates(name):
    """In batches whose drafts are cut at unlike places, and at a temperature at which they are mostly wrong."""
    requests = one_of_each(1.5, n=2, logprobs=1)
    outputs = run(make_llm(name), requests)
    check_one_of_each(outputs)
    assert_same(outputs, run(make_llm(), requests))


def test_candidates_of_one_form_differ():
    params = SamplingParams(n=8, seed=3, temperature=1.5, max_tokens=90, structured_outputs={"json": SCHEMA})
    assert len({completion.text for completion in generate(make_llm("ngram"), "ab", params)[0].outputs}) > 6


@pytest.mark.parametrize("name", [*DRAFTERS, *PADDED])
def test_rejection_follows_forms_and_stays_with_its_seed(name):
    requests = one_of_each(1.2)
    outputs = run(make_llm(name, "rejection"), requests)
    check_one_of_each(outputs)
    assert_same(run(make_llm(name, "rejection", 1, strategy="eqspec"), requests, [2, 0, 4, 3, 1]), outputs)


@pytest.mark.parametrize("name", [*DRAFTERS, *PADDED])
def test_rejection_at_temperature_zero_follows_forms_greedily(name):
    requests = one_of_each(0.0)
    outputs = run(make_llm(name, "rejection"), requests)
    check_one_of_each(outputs)
    assert_same(outputs, run(make_llm(), requests))


class PlannedDrafter:
    """Drafts what it is told to at a number of output tokens, and nothing elsewhere."""

    def __init__(self, plan):
        self.plan = plan

    def propose(self, batch, limits):
        drafts = [
            self.plan.get((row.request_id, row.num_output_tokens), [])[:limit]
            for row, limit in zip(batch.values(), limits, strict=True)
        ]
        return Draft.from_lists(drafts, torch.device("cpu"))

    def release_row(self, row, last):
        pass


def planned_llm(plan):
    llm = new_llm("ngram")
    llm.engine.drafter = PlannedDrafter(plan)
    return llm


def test_a_draft_is_cut_where_it_breaks_the_form_and_only_the_rest_is_verified():
    """The one text that fits is drafted with a wrong letter at each place in turn, and on behind its end token."""
    word = TOKENIZER("banana").input_ids
    params = SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": "banana"})
    wanted = generate(make_llm(), "ab", params)[0]
    assert wanted.outputs[0].text == "banana"
    for place in range(5):
        wrong = [*word[:place], 30, *word[place + 1 :]]
        output = generate(planned_llm({("0", 0): wrong[:5]}), "ab", params)[0]
        assert_same([output], [wanted])
        assert output.metrics.num_draft_tokens == output.metrics.num_accepted_tokens == place
    output = generate(planned_llm({("0", 3): [*word[3:], 256, 256]}), "ab", params)[0]
    assert_same([output], [wanted])
    assert output.metrics.num_draft_tokens == output.metrics.num_accepted_tokens == 4


def test_drafts_that_are_cut_leave_the_other_rows_of_the_batch_as_they_are():
    """Rows with and without a form, whose drafts are cut to nothing, cut short, and not cut."""
    bad, good = [30] * 5, TOKENIZER("xyzzy").input_ids
    form = {"structured_outputs": {"regex": "xyzzy[0-9]{12}"}}
    requests = [("ab", SamplingParams(seed=place, max_tokens=20, **form)) for place in range(3)]
    free = "cd ef", SamplingParams(seed=9, max_tokens=20, ignore_eos=True)
    wanted = run(make_llm(), [*requests, free])
    plan = {("0", step): bad for step in range(20)} | {("1", 0): good[:2] + bad[:3], ("2", 0): good[:4]}
    outputs = run(planned_llm(plan), [*requests, free])
    assert_same(outputs, wanted)
    assert [output.metrics.num_draft_tokens for output in outputs] == [0, 2, 4, 0]
    assert_same(run(planned_llm(plan | {("3", 0): bad}), [*requests, free]), wanted)
    assert_same(run(planned_llm({("0", step): bad for step in range(20)}), requests), wanted[:3])


class DrawingDrafter(PlannedDrafter):
    """Draws the first token of each row from the same distribution, and says so."""

    def __init__(self, shares):
        self.probs = torch.zeros(VOCABULARY).index_add(
            0, torch.tensor(list(shares)), torch.tensor([*shares.values()])
        )
        self.chance = random.Random(5)

    def propose(self, batch, limits):
        num_tokens = [int(row.num_output_tokens == 0) for row in batch.values()]
        drawn = self.chance.choices(range(VOCABULARY), self.probs.tolist(), k=len(num_tokens))
        probs = self.probs.repeat(len(num_tokens), 1, 1)
        return Draft(torch.tensor(drawn).unsqueeze(1), [1] * len(num_tokens), probs).cut(num_tokens)


def test_rejection_draws_from_what_the_form_allows_even_if_half_of_all_drafts_break_it():
    """A draft that breaks the form has to be judged and rejected: dropped, it would come again as a free draw."""
    a, b, wrong = TOKENIZER("ab!").input_ids
    logits = MODEL(torch.tensor([TOKENIZER("once").input_ids])).logits[0, -1]
    even = (logits[a] - logits[b]).item()
    params = SamplingParams(
        n=800, seed=1, max_tokens=3, structured_outputs={"regex": "[ab]"}, logit_bias={b: even}
    )
    llm = new_llm("ngram", "rejection", 100)
    llm.engine.drafter = DrawingDrafter({wrong: 0.5, a: 0.45, b: 0.05})
    output = generate(llm, "once", params)[0]
    texts = [completion.text for completion in output.outputs]
    assert set(texts) == {"a", "b"}
    assert texts.count("a") == pytest.approx(400, abs=4 * (800 * 0.25) ** 0.5)
    assert output.metrics.num_accepted_tokens == pytest.approx(400, abs=4 * (800 * 0.25) ** 0.5)


@pytest.mark.parametrize("name", DRAFTING)
def test_a_text_that_other_parameters_drove_out_of_its_form_ends_at_once(name):
    """Nothing is left to choose from. The second request has to leave its form in the middle."""
    z = TOKENIZER("z").input_ids
    form = {"structured_outputs": {"regex": "[a-c]{3}"}}
    early = SamplingParams(seed=1, allowed_token_ids=[*z, 256], **form)
    late = SamplingParams(seed=1, bad_words=[[one, other] for one in ABC for other in ABC], **form)
    outputs = generate(make_llm(name), ["ab", "abc"], [early, late])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    assert [output.outputs[0].token_ids[-1] for output in outputs] == [256, 256]


@pytest.mark.parametrize(("end", "ignore_eos"), [(257, True), (257, False), (TOKENIZER("!").input_ids[0], True)])
@pytest.mark.parametrize("name", ["none", "ngram"])
def test_a_stop_token_ends_the_form_like_the_model_s_own_end_token(name, ignore_eos, end):
    params = SamplingParams(
        n=4,
        seed=1,
        max_tokens=30,
        logit_bias={end: 40.0},
        stop_token_ids=[end],
        ignore_eos=ignore_eos,
        structured_outputs={"regex": "(ab)+"},
    )
    for completion in generate(make_llm(name), "ab ab", params)[0].outputs:
        assert (completion.text, completion.stop_reason) == ("ab", end)


def test_a_stop_string_may_end_the_text_before_its_form():
    params = SamplingParams(seed=1, max_tokens=90, structured_outputs={"json": SCHEMA}, stop='"n"')
    for name in DRAFTING:
        completion = generate(make_llm(name), '"n" "n"', params)[0].outputs[0]
        assert (completion.stop_reason, completion.finish_reason) == ('"n"', "stop")
        assert re.fullmatch(r'\{"color": "(red|green|dark blue)", ', completion.text)


UNBOUNDED = {
    "regex": {"regex": r"([a-z]+ )+[.]"},
    "schema": {"json": {"type": "array", "items": {"type": "string"}}},
    "grammar": {"grammar": 'root ::= "(" root ")" root | ""'},
}


@pytest.mark.parametrize("form", UNBOUNDED)
@pytest.mark.parametrize("name", DRAFTING)
def test_what_the_budget_cuts_off_is_a_beginning_of_the_form(name, form):
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY, frozenset({256}))
    num_cut = 0
    for max_tokens in (1, 2, 7, 20):
        params = SamplingParams(n=3, seed=1, max_tokens=max_tokens, structured_outputs=UNBOUNDED[form])
        for completion in generate(make_llm(name), "ab ab [ab", params)[0].outputs:
            grammar = compiler.compile(UNBOUNDED[form], frozenset({256}))()
            assert grammar.num_valid([], completion.token_ids) == len(completion.token_ids)
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 256)
            num_cut += completion.finish_reason == "length"
    assert num_cut > 0


def test_a_form_takes_effect_in_processed_log_probabilities_only():
    params = SamplingParams(seed=1, max_tokens=9, structured_outputs={"choice": ["yes"]}, logprobs=0)
    raw, processed = (
        generate(make_llm("ngram", logprobs_mode=f"{mode}_logprobs"), "ab", params)[0].outputs[0]
        for mode in ("raw", "processed")
    )
    assert raw.text == processed.text == "yes"
    assert processed.cumulative_logprob == pytest.approx(0.0, abs=1e-9)  # there was no choice
    assert raw.cumulative_logprob < -1


def test_other_parameters_choose_among_what_the_form_allows():
    form = {"structured_outputs": {"regex": "[a-z]{12}"}}
    spared = SamplingParams(
        seed=1, bad_words=["a", "b", "c"], logit_bias={TOKENIZER("q").input_ids[0]: 9.0}, **form
    )
    allowed = SamplingParams(seed=1, allowed_token_ids=[*TOKENIZER("xyz!").input_ids, 256], **form)
    for name in DRAFTING:
        one, other = (output.outputs[0].text for output in generate(make_llm(name), ["ab"] * 2, [spared, allowed]))
        assert re.fullmatch("[d-z]{12}", one)
        assert "q" in one
        assert re.fullmatch("[xyz]{12}", other)


def test_a_form_that_was_compiled_before_is_not_mixed_up_with_another():
    llm = make_llm("ngram")
    for word in ("one", "two", "one"):
        params = SamplingParams(seed=1, structured_outputs={"choice": [word]})
        assert generate(llm, "ab", params)[0].outputs[0].text == word


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, 'structured_outputs json cannot .*"nonsense"'),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs json cannot be compiled: .*JSON"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs json cannot be compiled: .*JSON"),
        ({"structured_outputs": {"json": {"$ref": "#/no"}}}, "structured_outputs json cannot be compiled: .*no"),
        ({"structured_outputs": {"json": {"a": {1, 2}}}}, "structured_outputs json cannot be compiled: .*set"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs regex cannot be compiled: .*parenthesis"),
        ({"structured_outputs": {"grammar": "root ::= other"}}, 'grammar cannot be compiled: .*Rule "other"'),
        ({"structured_outputs": {"grammar": 'start ::= "a"'}}, "grammar cannot be compiled: .*root"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "structured_outputs needs an end token: ignore_eos must be False, or give stop_token_ids",
        ),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_with_its_reason_and_nothing_runs(fields, message):
    llm = make_llm()
    steps = llm.engine.stats.num_steps
    with pytest.raises(ValueError, match=f"prompt 1: {message}|prompt 1: structured_outputs {message}"):
        generate(llm, ["ab", "cd"], [SamplingParams(), SamplingParams(**fields)])
    assert llm.engine.stats.num_steps == steps


def test_without_a_tokenizer_there_are_no_forms():
    llm, params = LLM(MODEL, skip_tokenizer_init=True), SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="prompt 0: structured_outputs needs a tokenizer"):
        generate(llm, [[5, 6]], params)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer; make the request through LLM"):
        llm.engine.add_request("a", [5, 6], params)


def test_without_xgrammar_the_package_is_named_and_other_requests_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    llm = new_llm()
    with pytest.raises(ValueError, match=r"needs the package xgrammar: pip install 'batchspec\[structured\]'"):
        generate(llm, "ab", SamplingParams(structured_outputs={"regex": "a"}))
    assert len(generate(llm, ["ab"], SamplingParams())) == 1


def test_a_tokenizer_that_xgrammar_cannot_read_is_told(monkeypatch):
    llm = new_llm()
    monkeypatch.setattr(llm, "tokenizer", object())
    with pytest.raises(ValueError, match="structured_outputs cannot be had with this tokenizer: "):
        llm.prepare([5, 6], SamplingParams(structured_outputs={"regex": "a"}), "0")


def test_a_stop_token_that_is_text_of_the_form_ends_the_request_where_it_comes():
    stop = TOKENIZER("a").input_ids
    params = SamplingParams(seed=1, stop_token_ids=stop, structured_outputs={"regex": "b{2}a{3}"})
    completion = make_llm("ngram").generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == TOKENIZER("bba").input_ids
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop[0])


def test_errors_name_no_place_in_the_compiler():
    with pytest.raises(ValueError, match="structured_outputs regex cannot be compiled: Regex parsing error"):
        make_llm("none").generate("x", SamplingParams(structured_outputs={"regex": "("}), use_tqdm=False)


def test_allowed_tokens_without_an_end_token_are_refused():
    params = SamplingParams(structured_outputs={"choice": ["ab"]}, allowed_token_ids=TOKENIZER("abc").input_ids)
    with pytest.raises(ValueError, match="allowed_token_ids must hold an end token with structured_outputs"):
        make_llm("none").generate("x", params, use_tqdm=False)
