"""Candidates behind an OpenAI-compatible `/v1/completions`: vLLM, SGLang, llama.cpp and others.

Only Python's own HTTP client is needed. A batch size is a number of requests that are under way at once.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from batchspec.audit.answers import STOPPED, Answer, Engine, Job, failure
from batchspec.audit.target import Target, retokenised
from batchspec.llm import LLM

TELL_IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
"""What makes servers tell token ids: the first is vLLM's, the second that of its older versions; llama.cpp puts
ids beside log-probabilities. Servers that refuse unknown fields are asked without."""

DIALECTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ids", TELL_IDS),
    ("ids", {}),
    ("text", TELL_IDS | {"add_special_tokens": False}),
    ("text", {}),
)
"""How a prompt is sent, tried in this order as long as the server refuses the request as malformed."""

MALFORMED = (400, 415, 422)

Post = Callable[[dict[str, Any]], dict[str, Any]]


def open_server(
    target: Target,
    *,
    url: str,
    model: str,
    timeout: float = 600.0,
    prompt: str = "ids",
) -> Engine:
    """A server that runs the target, or so we are told; it is not asked before the first prompt.

    `url` goes up to and without `/completions`; `timeout` is in seconds. Prompts are sent as `text`, or as `ids`
    if the server takes them. A key is taken from the environment alone, as commands are written into reports.
    """
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    post = partial(_post, f"{url}/completions", headers, float(timeout))
    dialects = [dialect for dialect in DIALECTS if prompt in ("ids", dialect[0])]
    return partial(_answer_all, partial(_answer, target.llm, model, post, dialects))


def _answer_all(answer: Callable[[Job], Answer], jobs: list[Job], batch_size: int) -> Iterator[tuple[int, Answer]]:
    if jobs:  # alone, so that the dialect is known before many ask at once
        yield 0, _sure_answer(answer, jobs[0])
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    for place in range(1, len(jobs)):
        waiting.put(place)

    def work() -> None:
        while True:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            answers.put((place, _sure_answer(answer, jobs[place])))

    for _ in range(min(batch_size, len(jobs) - 1)):
        threading.Thread(target=work, daemon=True).start()  # so that Ctrl-C need not wait for the server
    for _ in range(1, len(jobs)):
        yield answers.get()


def _sure_answer(answer: Callable[[Job], Answer], job: Job) -> Answer:
    try:
        return answer(job)
    except Exception as error:  # noqa: BLE001 - whatever a server does is its failure, and part of the report
        return failure(error)


def _answer(target: LLM, model: str, post: Post, dialects: list[tuple[str, dict[str, Any]]], job: Job) -> Answer:
    """Ask for one completion. Dialects in front of the one that the server understands are dropped for good."""
    for dialect in list(dialects):
        form, extras = dialect
        body = {
            "model": model,
            "prompt": job.prompt_token_ids if form == "ids" else prompt_as_text(target, job.prompt_token_ids),
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "top_p": 1.0,
            "seed": job.seed,
            **extras,
        }
        try:
            answer = read_choice(target, post(body)["choices"][0], job.max_tokens)
        except urllib.error.HTTPError as error:
            reason = _reason(error)
            if error.code not in MALFORMED or dialect == dialects[-1]:
                return Answer([], error=reason)
            continue
        while dialects[0] is not dialect and dialect in dialects:
            dialects.pop(0)
        return answer
    return Answer([], error="no request was understood")


def read_choice(target: LLM, choice: dict[str, Any], max_tokens: int) -> Answer:
    """An answer's tokens, from the first place in which a server may tell them; else from its text.

    Raises:
        ValueError, KeyError, TypeError: this is no completion.
    """
    text, is_stopped = choice["text"], choice.get("finish_reason") == "stop"
    ids = told_ids(choice)
    if ids is None:
        if not isinstance(text, str):
            raise ValueError(f"the server's text must be a string, got {text!r}")
        return Answer(retokenised(target, text, is_stopped), is_text=True)
    ends = target.engine.intake.eos_token_ids
    has_end = bool(ids) and ids[-1] in ends
    # Some servers keep the end token to themselves.
    return Answer([*ids, STOPPED] if is_stopped and not has_end and len(ids) < max_tokens else ids)


def told_ids(choice: dict[str, Any]) -> list[int] | None:
    """Token ids of a choice, if it has them.

    >>> told_ids({"logprobs": {"tokens": ["token_id:7", "token_id:12"]}})
    [7, 12]
    >>> told_ids({"logprobs": {"tokens": ["a", " b"]}}) is None
    True
    """
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content") or []
    tokens = logprobs.get("tokens") or []
    found: list[Any] | None = choice.get("token_ids")
    if found is None and entries and all(isinstance(entry, dict) and "id" in entry for entry in entries):
        found = [entry["id"] for entry in entries]
    if found is None and tokens and all(re.fullmatch(r"token_id:\d+", str(token)) for token in tokens):
        found = [int(token.removeprefix("token_id:")) for token in tokens]
    is_list = isinstance(found, list) and all(type(token) is int for token in found)
    return found if is_list else None


def prompt_as_text(target: LLM, token_ids: list[int]) -> str:
    """Text that becomes the same tokens again, if there is one (servers add the BOS token by themselves)."""
    tokenizer: Any = target.tokenizer
    text = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
    without = text.removeprefix(tokenizer.bos_token or "")
    return without if list(tokenizer(without).input_ids) == token_ids else text


def _post(url: str, headers: dict[str, str], timeout: float, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong, cut short."""
    try:
        said = error.read(2000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        said = ""
    return f"HTTP {error.code}: {' '.join(said.split())[:300] or error.reason}"
