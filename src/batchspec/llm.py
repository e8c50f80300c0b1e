"""Text in, text out: the face of the library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import count
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batchspec.config import EngineConfig, SpeculativeConfig
from batchspec.detokenizer import Detokenizer
from batchspec.drafting.build import Target, build_drafter
from batchspec.engine import Engine
from batchspec.models.capability import check_packed_support
from batchspec.models.loader import (
    context_length,
    end_token_ids,
    load_model,
    load_tokenizer,
    vocabulary_size,
)
from batchspec.models.runner import PackedRunner
from batchspec.request import RequestOutput, SamplingParams, Sequence

Prompt = str | ListOf[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`"""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that is ready to run."""

    sequence: Sequence
    prompt: str | None
    detokenizer: Detokenizer | None


class LLM:
    """Batched generation with speculative decoding that cannot change the output.

    Args:
        model: hub id, folder, .gguf file, or a loaded `PreTrainedModel` (set to eval mode, else left as it is).
        tokenizer: name of, or a loaded, tokenizer; by default the model's.
        skip_tokenizer_init: run on token ids alone; `text` stays empty.
        speculative_config: `{"method": "ngram" | "draft_model", ...}`, see `SpeculativeConfig`; None: decode
            one token per row and round, which is the reference that speculation must equal.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16`, `float16` or `float64`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda:0`, ...
        max_num_seqs: rows of the batch; more prompts wait and take rows as they get free.
        max_model_len: tokens of prompt and output together; by default the model's context window.
        strategy: `packed`.

    Raises:
        ValueError: a setting is out of range, a model cannot be loaded or cannot run packed; says which and why.

    Example:
        >>> llm = LLM("path/to/model", speculative_config={"method": "ngram"})  # doctest: +SKIP
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        *,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        skip_tokenizer_init: bool = False,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        strategy: str = "packed",
    ) -> None:
        if isinstance(speculative_config, Mapping):
            speculative_config = SpeculativeConfig.from_dict(speculative_config)
        # Settings are checked before anything is loaded, as far as they can be.
        EngineConfig(max_model_len or 2, max_num_seqs, strategy)
        self.model = load_model(model, dtype, device)
        self.tokenizer = None if skip_tokenizer_init else _resolve_tokenizer(tokenizer, model)
        config = EngineConfig(
            max_model_len=_resolve_max_model_len(max_model_len, self.model),
            max_num_seqs=max_num_seqs,
            strategy=strategy,
            num_speculative_tokens=speculative_config.num_speculative_tokens if speculative_config else 0,
        )
        check_packed_support(self.model, config.max_model_len)
        runner = PackedRunner(self.model, config.max_num_seqs, config.max_model_len)
        self.engine = Engine(
            runner,
            build_drafter(speculative_config, Target(runner, self.tokenizer, config.max_num_seqs)),
            config,
            vocab_size=vocabulary_size(self.model),
            eos_token_ids=end_token_ids(self.model, self.tokenizer),
            bos_token_id=getattr(self.model.config.get_text_config(decoder=True), "bos_token_id", None),
        )
        self._serial = count()

    def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs come in the order of the prompts.

        Raises:
            ValueError: a prompt cannot be run (says which and why); then none was.
        """
        return self._finish(self._prepare_all(_as_list(prompts), sampling_params), use_tqdm)

    def chat(
        self,
        messages: ListOf[Message] | ListOf[ListOf[Message]],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, put into the model's chat template.

        Raises:
            ValueError: the tokenizer has no chat template, or a conversation cannot be run; then none was.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self._finish(self._prepare_all(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but gives a snapshot of each request after each round that it took part in.

        `request_id` is the prompt's place in the list. Closing the iterator aborts what is still running.
        """
        requests = iter(self._prepare_all(_as_list(prompts), sampling_params))
        yield from self.run(lambda: next(requests, None))

    def render_chat(self, messages: ListOf[Message]) -> Mapping[str, Any]:
        """Put a conversation into the chat template; gives a prompt of token ids, with its text.

        Raises:
            ValueError: there is no tokenizer or it has no chat template, or the template refuses the messages.
        """
        tokenizer = self._need_tokenizer("messages")
        if not tokenizer.chat_template:
            raise ValueError("messages need a chat template, and this model's tokenizer has none; use generate")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ValueError(f"messages do not fit the chat template: {error}") from error
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return {"prompt": text, "prompt_token_ids": ids}

    def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> PreparedRequest:
        """Tokenise and check one request without running it.

        Raises:
            ValueError: the prompt or the parameters cannot be run with this model; says why.
        """
        text, token_ids = self._tokenize(prompt)
        name = request_id if request_id is not None else f"request-{next(self._serial)}"
        if params.stop_strings:
            self._need_tokenizer("stop")
        sequence = self.engine.make_sequence(name, token_ids, params)
        if self.tokenizer is None:
            return PreparedRequest(sequence, text, None)
        detokenizer = self.make_detokenizer(sequence.token_ids, params)
        sequence.watch = detokenizer.push
        return PreparedRequest(sequence, text, detokenizer)

    def make_detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer:
        """A detokeniser for the output that follows a prompt."""
        return Detokenizer(self._need_tokenizer("text"), prompt_token_ids, params)

    def run(self, next_request: Callable[[], PreparedRequest | None]) -> Iterator[RequestOutput]:
        """Run prepared requests; yields snapshots after each round.

        `next_request` is called before each round while there is room, and may give None for "none now"; the run
        ends when all requests are finished and it gives None.

        Raises:
            RuntimeError: another run of this LLM is not finished.
        """
        if self.engine.has_unfinished_requests():
            raise RuntimeError("this LLM is already generating; finish or close that run first")
        live: dict[str, PreparedRequest] = {}
        try:
            while True:
                self._top_up(next_request, live)
                if not self.engine.has_unfinished_requests():
                    return
                for output in self.engine.step():
                    request = live.pop(output.request_id) if output.finished else live[output.request_id]
                    yield _with_text(output, request)
        finally:
            for request_id in live:
                self.engine.abort_request(request_id)

    def _top_up(
        self, next_request: Callable[[], PreparedRequest | None], live: dict[str, PreparedRequest]
    ) -> None:
        """Keep every row busy; requests that would only wait are left where they come from."""
        while len(live) < self.engine.config.max_num_seqs:
            request = next_request()
            if request is None:
                return
            live[request.sequence.request_id] = request
            self.engine.add_sequence(request.sequence)

    def _finish(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        source = iter(requests)
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as progress:
            for output in self.run(lambda: next(source, None)):
                if output.finished:
                    finished[output.request_id] = output
                    progress.update()
        return [finished[request.sequence.request_id] for request in requests]

    def _prepare_all(
        self, prompts: ListOf[Prompt], params: SamplingParams | ListOf[SamplingParams] | None
    ) -> list[PreparedRequest]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"sampling_params must be one or as many as prompts ({len(prompts)}), got {len(params)}"
            )
        requests = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.prepare(prompt, param, str(index)))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return requests

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, ListOf[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            if "prompt" not in prompt:
                raise ValueError(f"prompt must have the key 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("a text prompt")(prompt).input_ids
        if isinstance(prompt, list | tuple):
            return None, prompt
        raise ValueError(f"prompt must be text or a list of token ids, got {type(prompt).__name__}")

    def _need_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        return self.tokenizer


def _with_text(output: RequestOutput, request: PreparedRequest) -> RequestOutput:
    output.prompt = request.prompt
    if request.detokenizer is not None:
        text = request.detokenizer.text if output.finished else request.detokenizer.text_so_far()
        output.outputs[0].text = text
    return output


def _as_list(prompts: Prompt | ListOf[Prompt]) -> ListOf[Prompt]:
    """One prompt or many? A list of integers is one prompt, an empty list is none."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _resolve_tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None, model: Any
) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if isinstance(model, PreTrainedModel):
        raise ValueError("tokenizer must be given with a loaded model, or skip_tokenizer_init=True for token ids")
    return load_tokenizer(model)


def _resolve_max_model_len(wanted: int | None, model: PreTrainedModel) -> int:
    window = context_length(model)
    if wanted is None:
        if window is None:
            raise ValueError("max_model_len must be given: the model's config names no context window")
        return window
    if window is not None and wanted > window:
        raise ValueError(f"max_model_len must be at most {window}, the model's context window, got {wanted}")
    return wanted
