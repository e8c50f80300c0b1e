"""Servers with faults, from the request to the verdict."""

import itertools
import threading
from functools import partial

import pytest
import torch
from fake_server import choice, fake_server
from toy_target import TEXTS, make_target

from batchspec.audit.answers import STOPPED
from batchspec.audit.document import exit_code
from batchspec.audit.server_engine import told_ids
from batchspec.audit.session import Found, Plan, audit_all, open_candidate
from batchspec.audit.spec import parse_spec
from batchspec.models.reference import forced_logits, generate_alone, in_float32


def audit(target, complete, batch_sizes=(1, 3), **options):
    """Audit a server on the target's prompts; gives what was found, without the null band."""
    told = "".join(f",{name}={value}" for name, value in options.items())
    with fake_server(complete) as url:
        candidate = open_candidate(target, parse_spec(f"openai:{url},model=m{told}"), is_sampled=False)
        found = Found()
        audit_all(target, [candidate], Plan(list(batch_sizes)), found, lambda name, total: lambda: None)
    return found, [run for run in found.runs if not run.is_null]


def says(target, body):
    """The target's own answer to a request."""
    assert body["temperature"] == 0.0
    return generate_alone(target.llm.model, body["prompt"], body["max_tokens"], target.ends)


def counts(runs):
    return {
        kind: sum(run.counts[kind] for run in runs) for kind in ("identical", "near-tie", "violation", "error")
    }


def test_a_faithful_server_is_identical_and_asked_for_token_ids(target):
    bodies = []

    def complete(body):
        bodies.append(body)
        return choice(says(target, body))

    _, runs = audit(target, complete)
    assert counts(runs) == {"identical": 2 * len(TEXTS), "near-tie": 0, "violation": 0, "error": 0}
    assert exit_code(Found(runs=runs)) == 0
    assert all(body["return_token_ids"] and body["max_tokens"] == target.max_tokens for body in bodies)


def test_a_token_in_200_that_is_tampered_with_is_a_violation(target):
    served = itertools.count()
    tampered = []

    def complete(body):
        tokens = says(target, body)
        for place in range(len(tokens)):
            if next(served) % 200 == 150:
                tokens[place] = (tokens[place] + 1) % 256
                tampered.append((body["prompt"], place))
        return choice(tokens)

    _, runs = audit(target, complete, batch_sizes=(1,))
    assert len(tampered) == 1
    violations = [outcome for outcome in runs[0].outcomes if outcome.kind == "violation"]
    assert [(target.prompts[one.prompt], one.divergence.position) for one in violations] == tampered
    assert counts(runs)["identical"] == len(TEXTS) - 1
    assert exit_code(Found(runs=runs)) == 1


def test_swapped_near_ties_are_near_ties_and_other_swaps_are_not():
    """In bfloat16, where there are some; the server computes in float32."""
    target = make_target(torch.bfloat16)
    exact = partial(forced_logits, in_float32(target.llm.model))
    wanted_margin = [0.0, 0.0]

    def complete(body):
        tokens = says(target, body)
        top = exact([(body["prompt"], tokens)])[0].topk(2)
        low, high = wanted_margin
        for place, (first, second) in enumerate(top.values.tolist()):
            if low <= first - second <= high:
                taken = top.indices[place].tolist()
                other = taken[1] if tokens[place] == taken[0] else taken[0]
                return choice([*tokens[:place], other, *tokens[place + 1 :]])
        return choice(tokens)

    floor = audit(target, lambda body: choice(says(target, body)))[0].noise.floor
    wanted_margin[:] = 0.0, 0.9 * floor
    _, runs = audit(target, complete)
    assert counts(runs)["near-tie"] >= 4
    assert counts(runs)["violation"] == 0
    assert exit_code(Found(runs=runs)) == 0
    wanted_margin[:] = 1.1 * floor, 100.0
    _, runs = audit(target, complete)
    assert counts(runs)["violation"] >= 4
    assert counts(runs)["near-tie"] == 0


def test_what_fails_is_an_error_and_neither_a_match_nor_a_mismatch(target):
    def complete(body):
        if body["prompt"] == target.prompts[1]:
            return 503, {"error": "overloaded <now>"}
        if body["prompt"] == target.prompts[2]:
            return 200, {"choices": []}
        return choice(says(target, body))

    _, runs = audit(target, complete)
    assert counts(runs) == {"identical": 2 * (len(TEXTS) - 2), "near-tie": 0, "violation": 0, "error": 4}
    assert "HTTP 503" in runs[0].outcomes[1].error
    assert "overloaded" in runs[0].outcomes[1].error
    assert exit_code(Found(runs=runs)) == 0


def test_a_server_that_only_fails_could_not_be_audited(target):
    _, runs = audit(target, lambda body: (500, {}), batch_sizes=(2,))
    assert counts(runs)["error"] == len(TEXTS)
    assert exit_code(Found(runs=runs)) == 2
    candidate = open_candidate(target, parse_spec("openai:http://127.0.0.1:9,model=m"), is_sampled=False)
    found = Found()
    audit_all(target, [candidate], Plan([1]), found, lambda name, total: lambda: None)
    assert "URLError" in found.runs[-1].outcomes[0].error


@pytest.mark.parametrize("tampered", [False, True])
def test_a_server_of_text_only_is_compared_by_its_text(target, tampered):
    """It refuses token ids and unknown fields."""
    tokenizer = target.llm.tokenizer

    def complete(body):
        if not isinstance(body["prompt"], str) or "return_token_ids" in body:
            return 422, {"error": "unknown field"}
        ids = list(tokenizer(body["prompt"]).input_ids)
        tokens = generate_alone(target.llm.model, ids, body["max_tokens"], target.ends)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        is_stopped = tokens[-1] in target.ends
        return choice(text=text[:-1] + "#" if tampered else text, finish_reason="stop" if is_stopped else "length")

    _, runs = audit(target, complete)
    assert counts(runs)["violation" if tampered else "identical"] == 2 * len(TEXTS)
    assert all(run.num_from_text == len(TEXTS) for run in runs)


def test_ends_that_a_server_keeps_to_itself_are_put_back():
    """The target ends early, the server leaves the end token out, or does not end."""
    target = make_target()
    first = target.references[0]
    target.llm.engine.intake.eos_token_ids = frozenset({first[3], 256})
    target.references[:] = [
        generate_alone(target.llm.model, prompt, target.max_tokens, target.ends) for prompt in target.prompts
    ]
    assert target.references[0][-1] in target.ends

    def without_end(body):
        tokens = says(target, body)
        is_stopped = tokens[-1] in target.ends
        return choice(tokens[:-1] if is_stopped else tokens, finish_reason="stop" if is_stopped else "length")

    def over_the_end(body):
        return choice(generate_alone(target.llm.model, body["prompt"], body["max_tokens"], []))

    def early(body):
        return choice(says(target, body)[:2], finish_reason="stop")

    assert counts(audit(target, without_end)[1])["identical"] == 2 * len(TEXTS)
    beyond = audit(target, over_the_end)[1][0].outcomes[0]
    assert (beyond.kind, beyond.divergence.position) == ("violation", len(target.references[0]))
    stopped = audit(target, early)[1][0].outcomes[1]
    assert (stopped.kind, stopped.divergence.got) == ("violation", STOPPED)


@pytest.mark.parametrize(
    "tell",
    [
        lambda ids: {"logprobs": {"tokens": [f"token_id:{token}" for token in ids]}},
        lambda ids: {"logprobs": {"content": [{"id": token, "token": "?"} for token in ids]}},
    ],
)
def test_token_ids_are_found_where_servers_put_them(target, tell):
    _, runs = audit(target, lambda body: choice(text="?", **tell(says(target, body))))
    assert counts(runs)["identical"] == 2 * len(TEXTS)
    assert not any(run.num_from_text for run in runs)


def test_what_is_no_token_id_is_not_taken_for_one(target):
    """True and False are integers, to Python."""
    assert told_ids({"token_ids": [True, False]}) is None
    _, runs = audit(target, lambda body: choice(text="", token_ids=[True, False]))
    assert counts(runs)["violation"] == 2 * len(TEXTS)


def test_a_batch_size_is_the_number_of_requests_at_once(target):
    lock = threading.Lock()
    barrier_met = threading.Event()
    now, most = 0, 0

    def complete(body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            if now == 3:
                barrier_met.set()
        barrier_met.wait(0.2)
        answer = choice(says(target, body))
        with lock:
            now -= 1
        return answer

    audit(target, complete, batch_sizes=(3,))
    assert most == 3
