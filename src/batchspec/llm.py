"""Text in, text out: the face of the library."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from batchspec.config import EngineConfig, PoolConfig, SpeculativeConfig
from batchspec.detokenizer import Detokenizer, bad_word_ids
from batchspec.drafting.build import Target, build_drafter
from batchspec.engine import Engine
from batchspec.models import prepacking
from batchspec.models.capability import make_invariant_runner, make_runner
from batchspec.models.invariance import Limits
from batchspec.models.loader import (
    bos_token_id,
    end_token_ids,
    ignored_generation_settings,
    load_model,
    resolve_max_model_len,
    resolve_tokenizer,
    vocabulary_size,
)
from batchspec.outputs import RequestOutput, TokenLogprobs
from batchspec.request import Grammar, Sequence
from batchspec.sampling.grammar import GrammarCompiler
from batchspec.sampling_params import SamplingParams
from batchspec.stats import StageTimer

Prompt = str | ListOf[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`"""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request that is ready to run."""

    sequence: Sequence
    """The first candidate; `siblings` holds all."""
    prompt: str | None
    detokenizers: list[Detokenizer]
    """One for each candidate; none without a tokenizer."""


class LLM:
    """Batched generation with speculative decoding that cannot change the output.

    Args:
        model: hub id, folder, .gguf file, or a loaded `PreTrainedModel` (set to eval mode, else left as it is).
        tokenizer: name of, or a loaded, tokenizer; by default the model's.
        skip_tokenizer_init: run on token ids alone; `text` stays empty.
        speculative_config: `{"method": "ngram" | "suffix" | "draft_model" | "early_exit", ...}`, see
            `SpeculativeConfig`; None: decode one token per row and round, which is the reference that speculation
            must equal.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16`, `float16` or `float64`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda:0`, ...
        max_num_seqs: rows of the batch; more prompts wait and take rows as they get free.
        max_model_len: tokens of prompt and output together; by default the model's context window.
        strategy: `packed`: no padding and no realignment, the fastest. `eqspec` and `exspec`: the methods of
            *Batch Speculative Decoding Done Right* over transformers' own attention, for comparison and for
            models that cannot run packed.
        numerics: `invariant`: a request's tokens are the same bit for bit whatever is beside it in the batch, and
            with or without speculation, in any dtype. `fast`: the same up to rounding, at a little less cost. The
            padded strategies are the same up to rounding in any case.
        refill: give the rows of finished sequences to waiting prompts; False: only when the whole batch is done.
        pool_config: with `exspec`, `{"window": ..., "group_by": ..., ...}`, see `PoolConfig`.
        seed: of requests that name none. The same calls on an LLM of the same seed give the same outputs, and no
            two requests share their noise.
        logprobs_mode: `raw_logprobs`: of the model's own logits; `processed_logprobs`: of the distribution that
            the token was chosen from. Those of the prompt are always raw.
        prepack: reorder the weights of a model that is loaded here for the CPU's kernels, which is faster; such a
            model does not train, move or take other weights any more. A loaded model stays as it is.

    Raises:
        ValueError: a setting is out of range, a model cannot be loaded or cannot run by the strategy; says which
            and why.

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
        numerics: str = "invariant",
        refill: bool = True,
        pool_config: PoolConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        logprobs_mode: str = "raw_logprobs",
        prepack: bool = True,
    ) -> None:
        speculation = _as_config("speculative_config", speculative_config, SpeculativeConfig)
        speculation = speculation and speculation.for_strategy(strategy)
        if not isinstance(prepack, bool):
            raise ValueError(f"prepack must be True or False, got {prepack!r}")
        # Settings are checked before anything is loaded, as far as they can be.
        config = EngineConfig(
            max_model_len=2 if max_model_len is None else max_model_len,
            max_num_seqs=max_num_seqs,
            strategy=strategy,
            numerics=numerics,
            refill=refill,
            pool=_as_config("pool_config", pool_config, PoolConfig),
            seed=seed,
            sampling_method=speculation.sampling_method if speculation else "coupled",
            logprobs_mode=logprobs_mode,
        )
        self.model = load_model(model, dtype, device)
        if prepack and not isinstance(model, PreTrainedModel):
            prepacking.prepack(self.model)
        self.tokenizer = None if skip_tokenizer_init else resolve_tokenizer(tokenizer, model)
        window = resolve_max_model_len(max_model_len, self.model)
        speculation = speculation and speculation.for_window(window)
        most = speculation.most_draft_tokens if speculation else 0
        config = replace(config, max_model_len=window, num_speculative_tokens=most)
        is_gpu = self.model.device.type == "cuda"
        timer = StageTimer(partial(torch.cuda.synchronize, self.model.device) if is_gpu else None)
        if config.is_invariant:
            limits = Limits(config.num_rows, 1 + config.num_speculative_tokens, config.max_model_len)
            runner = make_invariant_runner(self.model, limits)
        else:
            runner = make_runner(strategy, self.model, config.num_rows, config.max_model_len, timer)
        self.engine = Engine(
            runner,
            build_drafter(speculation, Target(runner, self.tokenizer, strategy, timer)),
            config,
            vocab_size=vocabulary_size(self.model),
            eos_token_ids=end_token_ids(self.model, self.tokenizer),
            bos_token_id=bos_token_id(self.model),
            timer=timer,
        )
        self._is_running = False
        self._grammars: GrammarCompiler | None = None
        if ignored := ignored_generation_settings(self.model):
            named = ", ".join(f"{name}={value}" for name, value in ignored.items())
            warnings.warn(
                f"the model's generation config sets {named}, which transformers' generate applies and batchspec "
                "does not: only what SamplingParams says counts",
                stacklevel=2,
            )

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
        prompts = []
        for index, conversation in enumerate(conversations):
            with _naming(f"conversation {index}"):
                prompts.append(self.render_chat(conversation))  # type: ignore[arg-type]
        return self._finish(self._prepare_all(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | ListOf[Prompt],
        sampling_params: SamplingParams | ListOf[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but gives a snapshot of each request after each round that it took part in.

        `request_id` is the prompt's place in the list. Closing the iterator aborts what is still running. As with
        any generator, nothing happens, and nothing is checked, before the first snapshot is asked for.
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
        return {"prompt": text, "prompt_token_ids": self._encode(text, add_special_tokens=False)}

    def prepare(
        self, prompt: Prompt, params: SamplingParams, request_id: str, serial: int | None = None
    ) -> PreparedRequest:
        """Tokenise and check one request without running it.

        `serial` is what a request without a seed gets one from; by default requests are counted as they come.

        Raises:
            ValueError: the prompt or the parameters cannot be run with this model; says why.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        text, token_ids = self.tokenize(prompt)
        if params.stop_strings:
            self._need_tokenizer("stop")
        if any(isinstance(word, str) for word in params.bad_words or ()):
            params = replace(params, bad_words=bad_word_ids(self._need_tokenizer("bad_words"), params.bad_words))
        make_grammar = self._compile(params) if params.structured_outputs is not None else None
        sequence = self.engine.intake.make_sequence(
            request_id, token_ids, params, serial=serial, make_grammar=make_grammar
        )
        if self.tokenizer is None:
            return PreparedRequest(sequence, text, [])
        detokenizers = [self.make_detokenizer(sequence.token_ids, params) for _ in sequence.siblings]
        for sibling, detokenizer in zip(sequence.siblings, detokenizers, strict=True):
            sibling.watch = detokenizer.push
        return PreparedRequest(sequence, text, detokenizers)

    def _compile(self, params: SamplingParams) -> Callable[[], Grammar]:
        tokenizer, intake = self._need_tokenizer("structured_outputs"), self.engine.intake
        if self._grammars is None:
            self._grammars = GrammarCompiler(tokenizer, intake.vocab_size, intake.eos_token_ids)
        # Stop tokens that are text may be text of the form, and then end the request where they come. They end the
        # form only if there is no other end token.
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        own = frozenset() if params.ignore_eos else intake.eos_token_ids
        ends = own.union(special.intersection(params.stop_ids)) or frozenset(params.stop_ids)
        return self._grammars.compile(params.structured_outputs or {}, ends)

    def make_detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer:
        """A detokeniser for the output that follows a prompt."""
        return Detokenizer(self._need_tokenizer("text"), prompt_token_ids, params)

    def run(self, next_request: Callable[[], PreparedRequest | None]) -> Iterator[RequestOutput]:
        """Run prepared requests; yields snapshots after each round.

        `next_request` is called before each round while there is room, and may give None for "none now"; the run
        ends when all requests are finished and it gives None.

        Raises:
            RuntimeError: another run of this LLM, or a request added to its engine, is not finished.
        """
        if self._is_running or self.engine.has_unfinished_requests():
            raise RuntimeError("this LLM is already generating; finish or close that run first")
        self._is_running = True
        live: dict[str, PreparedRequest] = {}
        try:
            while True:
                for name in [name for name, request in live.items() if request.sequence.is_request_finished]:
                    aborted = live.pop(name)  # by somebody who holds the engine
                    yield self._with_text(aborted.sequence.to_output(), aborted)
                self._top_up(next_request, live)
                if not live:
                    return
                for output in self.engine.step():
                    request = live.pop(output.request_id) if output.finished else live[output.request_id]
                    yield self._with_text(output, request)
        finally:
            self.engine.abort_all_requests()
            self._is_running = False

    def _top_up(
        self, next_request: Callable[[], PreparedRequest | None], live: dict[str, PreparedRequest]
    ) -> None:
        """Keep every row busy; requests that would only wait are left where they come from."""
        while sum(request.sequence.num_unfinished for request in live.values()) < self.engine.config.num_rows:
            request = next_request()
            if request is None:
                return
            live[request.sequence.request_id] = request
            self.engine.add_sequence(request.sequence)

    def _finish(self, requests: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        # Longest prompts first: a step's attention reads as far as its longest row, so rows of like length belong
        # together; and a prompt that is too long for the memory is met at once.
        source = iter(sorted(requests, key=lambda request: -request.sequence.num_prompt_tokens))
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as progress:
            for output in self.run(lambda: next(source, None)):
                if output.finished:
                    finished[output.request_id] = output
                    progress.update()
        return [finished[request.sequence.request_id] for request in requests]

    def _prepare_all(
        self, prompts: ListOf[Prompt], params: SamplingParams | ListOf[SamplingParams] | None
    ) -> list[PreparedRequest]:
        one_for_all = SamplingParams() if params is None else params
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [one_for_all] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling_params must be one or as many as prompts ({len(prompts)}), got {len(each)}"
            )
        requests = []
        for index, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
            with _naming(f"prompt {index}"):
                requests.append(self.prepare(prompt, param, str(index)))
        return requests

    def tokenize(self, prompt: Prompt) -> tuple[str | None, ListOf[int]]:
        """The text of a prompt, if it is one, and its token ids.

        Raises:
            ValueError: it is neither text nor token ids.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ValueError(f"prompt must have the key 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, _token_ids(prompt)

    def _with_text(self, output: RequestOutput, request: PreparedRequest) -> RequestOutput:
        output.prompt = request.prompt
        for completion, detokenizer in zip(output.outputs, request.detokenizers, strict=False):
            is_finished = completion.finish_reason is not None
            completion.text = detokenizer.text if is_finished else detokenizer.text_so_far()
            self._name_tokens(completion.logprobs or [])
        self._name_tokens(output.prompt_logprobs or [])
        return output

    def _name_tokens(self, logprobs: ListOf[TokenLogprobs | None]) -> None:
        """Fill in `decoded_token`; snapshots share their entries, so only the newest ones are without."""
        for entry in reversed(logprobs):
            if entry is None or self.tokenizer is None:
                continue
            if next(iter(entry.values())).decoded_token is not None:
                return
            for token, one in entry.items():
                one.decoded_token = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _encode(self, text: str, **settings: Any) -> list[int]:
        tokenizer = self._need_tokenizer("a text prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("prompt must be valid Unicode text; it holds half of a surrogate pair") from error
        return list(tokenizer(text, **settings).input_ids)

    def _need_tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        return self.tokenizer


Config = TypeVar("Config", SpeculativeConfig, PoolConfig)


def _as_config(name: str, value: Config | Mapping[str, Any] | None, kind: type[Config]) -> Config | None:
    if isinstance(value, Mapping):
        return kind.from_dict(value)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} must be a dictionary or None, got {value!r}")
    return value


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say which of many is meant, in errors raised within."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"prompt must be text or a list of token ids, got {type(value).__name__}")
    return list(value)


def _as_list(prompts: Prompt | ListOf[Prompt]) -> ListOf[Prompt]:
    """One prompt or many? A list of integers is one prompt, an empty list is none."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, ListOf):
        raise ValueError(f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}")
    if len(prompts) and all(isinstance(token, int) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
