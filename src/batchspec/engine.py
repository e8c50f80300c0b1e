"""The engine: requests in, tokens out. Token ids only; it knows nothing of text."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

from batchspec.config import EngineConfig, PoolConfig
from batchspec.decoding.judge import Judge
from batchspec.decoding.prompt import PromptReader
from batchspec.decoding.round import decode_round
from batchspec.drafting.drafter import Drafter
from batchspec.grouping import choose_batch
from batchspec.intake import Intake
from batchspec.models.runner import Runner
from batchspec.outputs import RequestOutput
from batchspec.request import Sequence, TokenWatch
from batchspec.sampling_params import SamplingParams
from batchspec.scheduler import Scheduler
from batchspec.stats import EngineStats, StageTimer


class Engine:
    """Decodes many requests together, a round of a batch per `step`.

    A request that ends frees its row at once, and the next waiting one takes it before the next round (without
    `refill`: when all rows are free).
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        config: EngineConfig,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bos_token_id: int | None = None,
        timer: StageTimer | None = None,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.config = config
        self.intake = Intake(vocab_size, config.max_model_len, config.seed, eos_token_ids, bos_token_id)
        self.judge = Judge(config.sampling_method, config.logprobs_mode)
        self.timer = timer or StageTimer()
        self.scheduler = Scheduler(config.num_rows, config.refill)
        self._finished_stats = EngineStats()
        self._ended: dict[Sequence, RequestOutput] = {}
        """Outputs of requests that have ended by themselves and are not given out yet."""
        self._is_stepping = False

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams | None = None,
        watch: TokenWatch | None = None,
    ) -> None:
        """Queue a request. `watch` sees each output token that becomes text and may end the request by it.

        Raises:
            ValueError: the id is in use, the prompt is empty (and the model has no BOS token), holds a token id
                outside the vocabulary, or leaves no room for an output token in the context window.
        """
        self.add_sequence(
            self.intake.make_sequence(request_id, prompt_token_ids, params or SamplingParams(), watch)
        )

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue all candidates of a request that `intake` made.

        Raises:
            ValueError: the id is in use.
        """
        if self.scheduler.find(sequence.request_id) is not None:
            raise ValueError(f"request_id {sequence.request_id!r} is in use by an unfinished request")
        self.scheduler.waiting.extend(sequence.siblings)

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended)

    def step(self) -> list[RequestOutput]:
        """Admit waiting requests and run one round.

        Returns a snapshot of every request that took part, but for those that were aborted. If a step fails, its
        rows go on with the next one, and nothing that ended before is lost.
        """
        with self.timer.stage("rest"):
            self._release_finished()
            self.scheduler.admit()
            batch = self._choose_batch()
            if batch:
                with self.timer.stage("prefill"):
                    self._prefill()
                self._run_round(batch)
            self._release_finished()
            running = {row.siblings[0]: row for row in batch.values() if not row.is_request_finished}
            snapshots = [row.to_output() for row in running.values()]
            ended, self._ended = self._ended, {}
            return [*ended.values(), *snapshots]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its row. Returns what it has so far, or None if it has ended already."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        for candidate in sequence.siblings:
            candidate.finish_reason = candidate.finish_reason or "abort"
            if candidate in self.scheduler.waiting:
                self.scheduler.waiting.remove(candidate)
        if not self._is_stepping:  # from within a round (a token watch): freed when the round ends
            self._release_finished()
        return sequence.to_output()

    def abort_all_requests(self) -> None:
        """Drop all requests, and outputs that were not given out yet."""
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            sequence.finish_reason = sequence.finish_reason or "abort"
        self.scheduler.waiting.clear()
        self._release_finished()
        self._ended.clear()

    @property
    def stats(self) -> EngineStats:
        """Counters over all requests so far, the running ones included."""
        total = replace(self._finished_stats)
        for sequence in self.scheduler.running:
            total.add(sequence.stats)
        return total

    def reset_stats(self) -> None:
        """Count anew from zero.

        Raises:
            RuntimeError: requests are running, whose counts would be torn.
        """
        if self.has_unfinished_requests():
            raise RuntimeError("stats cannot be reset while requests are unfinished")
        self._finished_stats = EngineStats()

    def _prefill(self) -> None:
        """Compute the prompts of new rows, each alone, all but the last token: a round computes that one."""
        for row, sequence in enumerate(self.scheduler.running):
            if sequence.length < sequence.num_prompt_tokens - 1:
                self._copy_prompt(row, sequence)
            missing = sequence.token_ids[sequence.length : -1]
            reader = PromptReader(sequence) if sequence.wants_prompt_logprobs else None
            if missing:
                self.runner.prefill(row, missing, sequence.length, reader.read if reader else None)
            if reader is not None:
                sequence.siblings[0].prompt_logprobs = reader.entries
            sequence.length += len(missing)
            self._finished_stats.num_prefilled_tokens += len(missing)

    def _copy_prompt(self, row: int, sequence: Sequence) -> None:
        """Take the prompt from another candidate of the request that has it in its row."""
        shared = sequence.num_prompt_tokens - 1
        for other, candidate in enumerate(self.scheduler.running):
            if candidate.siblings is sequence.siblings and candidate.length >= shared:
                self.runner.copy_row(other, row, shared)
                sequence.length = shared
                return

    def _choose_batch(self) -> dict[int, Sequence]:
        """The rows of the next round: all that run, or with EXSPEC those of the pool that go well together."""
        running = self.scheduler.running
        if self.config.strategy != "exspec" or not running:
            return dict(enumerate(running))
        with self.timer.stage("grouping"):
            chosen = choose_batch(running, self.config.max_num_seqs, self.config.pool or PoolConfig())
        return {row: running[row] for row in chosen}

    def _run_round(self, batch: dict[int, Sequence]) -> None:
        is_level = len({row.length for row in batch.values()}) == 1
        self._is_stepping = True
        try:
            decode_round(
                batch, self.runner, self.drafter, self.judge, self.config.num_speculative_tokens, self.timer
            )
        finally:
            self._is_stepping = False
        for row, sequence in enumerate(self.scheduler.running):
            sequence.waited = 0 if row in batch else sequence.waited + 1
            sequence.stats.num_waited_rounds += row not in batch
        self._finished_stats.num_steps += 1
        self._finished_stats.num_grouped_steps += is_level
        self._finished_stats.num_row_rounds += self.config.max_num_seqs

    def _release_finished(self) -> None:
        """Free the rows of finished sequences; the last row takes the place of each.

        A row whose request has more candidates is handed to the next one: its prompt is there, and rolling back to
        it is setting a length.
        """
        for row in reversed(range(len(self.scheduler.running))):
            sequence = self.scheduler.running[row]
            if sequence.is_finished:
                if sequence.is_request_finished and not sequence.is_aborted:
                    # Noted first, as releasing may be cut off.
                    self._ended[sequence.siblings[0]] = sequence.to_output()
                if self.scheduler.has_waiting_sibling(sequence):
                    self.drafter.release_row(row, row)
                    self.scheduler.hand_over(row).length = sequence.num_prompt_tokens - 1
                else:
                    self._release_row(row)
                self._finished_stats.add(sequence.stats)

    def _release_row(self, row: int) -> None:
        """Safe to be cut off anywhere: until all is moved, the last row counts as not computed."""
        last = len(self.scheduler.running) - 1
        moved = self.scheduler.running[last]
        length, moved.length = moved.length, 0
        self.drafter.release_row(row, last)
        self.runner.release_row(row, last, length)
        self.scheduler.release(row)
        moved.length = length
