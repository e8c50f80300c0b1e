"""Are two runs the same? Promise P1, and what it takes to run requests in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import pytest

from batchspec import LLM, SamplingParams
from batchspec.outputs import RequestOutput, TokenLogprobs

Request = tuple[str, SamplingParams]


def run(llm: LLM, requests: Sequence[Request], order: Iterable[int] | None = None) -> list[RequestOutput]:
    """Run requests in some order, each under the serial number of its place; outputs in the order of requests."""
    order = range(len(requests)) if order is None else order
    prepared = iter([llm.prepare(*requests[serial], str(serial), serial) for serial in order])
    finished = {output.request_id: output for output in llm.run(lambda: next(prepared, None)) if output.finished}
    return [finished[str(serial)] for serial in range(len(requests))]


def assert_same(got: Iterable[RequestOutput], wanted: Iterable[RequestOutput]) -> None:
    """Field by field, metrics aside; log-probabilities to 1e-5, as other shapes round otherwise."""
    for one, other in zip(got, wanted, strict=True):
        assert _exact(one) == _exact(other)
        assert _logprobs(one) == pytest.approx(_logprobs(other), abs=1e-5)


def _exact(output: RequestOutput) -> RequestOutput:
    """All that has to be equal to the last bit."""
    completions = [
        dataclasses.replace(completion, logprobs=_without_values(completion.logprobs), cumulative_logprob=None)
        for completion in output.outputs
    ]
    prompt = _without_values(output.prompt_logprobs)
    return dataclasses.replace(output, outputs=completions, prompt_logprobs=prompt, metrics=None)


def _without_values(entries: list[TokenLogprobs | None] | None):
    """Tokens, ranks and texts; which token comes first counts."""
    if entries is None:
        return None
    return [
        entry and (next(iter(entry)), {token: (one.rank, one.decoded_token) for token, one in entry.items()})
        for entry in entries
    ]


def _logprobs(output: RequestOutput) -> dict[object, float]:
    """All log-probabilities, by where they stand."""
    lists = {completion.index: completion.logprobs or [] for completion in output.outputs}
    lists["prompt"] = output.prompt_logprobs or []
    found = {
        (name, place, token): one.logprob
        for name, entries in lists.items()
        for place, entry in enumerate(entries)
        for token, one in (entry or {}).items()
    }
    sums = {completion.index: completion.cumulative_logprob for completion in output.outputs}
    return found | {index: total for index, total in sums.items() if total is not None}
