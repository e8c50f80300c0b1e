"""Lines to answer and conversations to go on with, for `batchspec generate`."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from batchspec.cli.options import notes
from batchspec.cli.records import RESERVED, ResultWriter
from batchspec.outputs import CompletionOutput, RequestOutput
from batchspec.records import KINDS, Record
from batchspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchspec.llm import LLM, PreparedRequest


class Work:
    """The lines that are still to be answered, and those whose next turn is."""

    def __init__(self, records: list[Record], params: SamplingParams) -> None:
        self.num_records = len(records)
        self.num_done = 0
        self.num_failed = 0
        self.params = params
        self._pending: deque[Conversation] = deque(Conversation(record) for record in records)
        self._running: dict[str, Conversation] = {}

    @property
    def num_left(self) -> int:
        return self.num_records - self.num_done - self.num_failed

    def skip(self, finished: dict[int, dict[str, Any]], output: str) -> None:
        """Leave out what the output file holds already.

        Raises:
            ValueError: it answers other lines than these.
        """
        fields = {conversation.record.index: conversation.record.fields for conversation in self._pending}
        for index, row in finished.items():
            # Compared as JSON, where NaN equals itself.
            own = {name: value for name, value in row.items() if name not in RESERVED}
            if index not in fields or json.dumps(own) != json.dumps(fields[index]):
                raise ValueError(f"--output {output!r} answers another input: line {index + 1} differs")
        left = [c for c in self._pending if c.record.index not in finished]
        self.num_done = len(self._pending) - len(left)
        self._pending = deque(left)

    def next_request(self, llm: LLM) -> PreparedRequest | None:
        """Prepare the next line; lines that cannot be answered are reported and left out."""
        while self._pending:
            conversation = self._pending.popleft()
            record = conversation.record
            try:
                if record.error is not None:
                    raise ValueError(record.error)
                if conversation.turns and self.params.n > 1:
                    raise ValueError("turns need -n 1: each turn follows one answer")
                request = llm.prepare(
                    conversation.next_prompt(llm), self.params, str(record.index), conversation.serial
                )
            except ValueError as error:
                self.num_failed += 1
                notes.print(f"[red]line {record.line}:[/red] {escape(str(error))}", soft_wrap=True)
                continue
            self._running[str(record.index)] = conversation
            return request
        return None

    def stop(self, llm: LLM) -> None:
        """Begin no more lines and drop those that are running; what is finished will still be given out."""
        self._pending.clear()
        for request_id in self._running:
            llm.engine.abort_request(request_id)

    def finish(self, answer: RequestOutput, writer: ResultWriter) -> None:
        """Write a finished line; a conversation with more turns goes on with the next."""
        conversation = self._running.pop(answer.request_id)
        if any(completion.finish_reason == "abort" for completion in answer.outputs):
            return
        conversation.answers.append(answer)
        if conversation.has_more_turns:
            self._pending.appendleft(conversation)
            return
        writer.write(conversation.record.index, conversation.record.fields, conversation.result())
        self.num_done += 1


class Conversation:
    """One line of input and the answers so far; all but `turns` have one answer."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.answers: list[RequestOutput] = []

    @property
    def turns(self) -> list[str]:
        return self.record.fields.get("turns", [])

    @property
    def has_more_turns(self) -> bool:
        return len(self.answers) < len(self.turns)

    @property
    def serial(self) -> int:
        """What its noise comes from: the line and the turn, so that it depends on no other line."""
        return self.record.index + (len(self.answers) << 32)

    def next_prompt(self, llm: LLM) -> Any:
        kind = next(kind for kind in KINDS if kind in self.record.fields)
        if kind == "prompt":
            return self.record.fields["prompt"]
        if kind == "messages":
            return llm.render_chat(self.record.fields["messages"])
        messages = []
        for turn, answer in zip(self.turns, [*self.answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer.outputs[0].text})
        return llm.render_chat(messages)

    def result(self) -> dict[str, Any]:
        outputs = [output for answer in self.answers for output in _as_json(answer)]
        return {"outputs": outputs} if self.turns or len(outputs) > 1 else {"output": outputs[0]}


def _as_json(answer: RequestOutput) -> list[dict[str, Any]]:
    """One for each candidate. The metrics are those of the whole request."""
    metrics = answer.metrics
    return [
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(answer.prompt_token_ids),
            "num_output_tokens": len(completion.token_ids),
            **_logprobs_as_json(completion),
            "metrics": {
                "num_rounds": metrics.num_rounds,
                "num_drafts": metrics.num_drafts,
                "num_draft_tokens": metrics.num_draft_tokens,
                "num_accepted_tokens": metrics.num_accepted_tokens,
            },
        }
        for completion in answer.outputs
    ]


def _logprobs_as_json(completion: CompletionOutput) -> dict[str, Any]:
    if completion.logprobs is None:
        return {}
    places = [
        [{"token_id": token, "token": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
         for token, one in entry.items()]
        for entry in completion.logprobs
    ]  # fmt: skip
    return {"cumulative_logprob": completion.cumulative_logprob, "logprobs": places}
