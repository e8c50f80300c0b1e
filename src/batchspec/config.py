"""Settings of an engine: frozen, and validated here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

METHODS = ("draft_model", "early_exit", "ngram", "suffix")
LOOKUPS = ("ngram", "suffix")
STRATEGIES = ("packed", "eqspec", "exspec")
NUMERICS = ("invariant", "fast")
GROUPINGS = ("length", "acceptance")
SAMPLING_METHODS = ("coupled", "rejection")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
ADAPTIVE_BY_DEFAULT = True
POOL_FACTOR = 4
"""Sequences in EXSPEC's pool for each row of a batch, by default."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How draft tokens are made.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    method: str
    """`draft_model`: a smaller model with the same tokenizer; `early_exit`: the target's first layers with its
    own final norm and head; `ngram`: look the last tokens up in the text; `suffix`: what most often followed the
    longest match, in the text or in earlier outputs."""
    model: Any = None
    """For `draft_model`: a hub id, a folder (of `batchspec train-drafter`, too), a .gguf file or a loaded
    `PreTrainedModel`. None: the drafter that batchspec brings, which drafts for `bundled_model()`."""
    num_layers: int | None = None
    """For `early_exit`: how many of the target's first layers draft."""
    num_speculative_tokens: int | None = None
    """Draft tokens per row and round, at most; None: 8 if drafting is adaptive, else 4."""
    prompt_lookup_max: int = 3
    """For `ngram`: the longest run of last tokens that is looked up; tried first."""
    prompt_lookup_min: int | None = None
    """For `ngram`: the shortest run of last tokens that is looked up; tried last. None: 1 if drafting is adaptive,
    which leaves out what does not pay, else 2."""
    suffix_min_match: int | None = None
    """For `suffix`: matches of fewer tokens give no draft. None: as `prompt_lookup_min`."""
    suffix_store_tokens: int = 0
    """For `suffix`: tokens of earlier outputs of this engine, whoever asked for them, that are kept to draft from;
    0, or at least 1000. 100,000 take 11 to 14 MB. Only with `coupled`: with `rejection`, which tokens are drawn
    depends on the drafts, and a request with a seed would not repeat."""
    sampling_method: str = "coupled"
    """`coupled`: sampled tokens are those that the request gets without drafts; `rejection`: the classical rule,
    other tokens of the same distribution, accepted somewhat more often."""

    lookup: str | None = None
    """For `draft_model` and `early_exit`: `ngram` or `suffix`, which is asked first. The model then drafts only
    the rows for which nothing good was found."""
    adaptive: bool | None = None
    """Draft and verify only what makes output faster, decided token by token, from what was accepted so far and
    from the time of steps; `num_speculative_tokens` is the most. None: yes, but for the padded strategies and for
    sampling method `rejection`, whose tokens depend on draft lengths, so that times would decide what a seed
    gives."""

    def __post_init__(self) -> None:
        _check_one_of("method", self.method, METHODS)
        _check_one_of("sampling_method", self.sampling_method, SAMPLING_METHODS)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "suffix_min_match"):
            if (value := getattr(self, name)) is not None:
                _check_at_least(name, value, 1)
        _check_at_least("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min or 1)
        _check_at_least("suffix_store_tokens", self.suffix_store_tokens, 0)
        if 0 < self.suffix_store_tokens < 1000:
            raise ValueError(f"suffix_store_tokens must be 0 or at least 1000, got {self.suffix_store_tokens}")
        if self.suffix_store_tokens and self.sampling_method == "rejection":
            raise ValueError("suffix_store_tokens must be 0 with sampling_method rejection, where drafts decide")
        if self.method != "draft_model" and self.model is not None:
            raise ValueError(f"model must not be given for method {self.method}: it drafts without one")
        if self.method == "early_exit" and self.num_layers is None:
            raise ValueError(
                "num_layers must be given for method early_exit: how many of the target's first layers"
            )
        if self.method != "early_exit" and self.num_layers is not None:
            raise ValueError(f"num_layers must not be given for method {self.method}: it goes with early_exit")
        if self.num_layers is not None:
            _check_at_least("num_layers", self.num_layers, 1)
        if self.lookup is not None:
            _check_one_of("lookup", self.lookup, LOOKUPS)
            if self.method in LOOKUPS:
                raise ValueError(f"lookup must not be given for method {self.method}: it is one itself")
            if self.sampling_method == "rejection":
                raise ValueError("lookup must be None with sampling_method rejection")
        if self.adaptive not in (None, True, False):
            raise ValueError(f"adaptive must be True, False or None, got {self.adaptive!r}")
        if self.adaptive and self.sampling_method == "rejection":
            raise ValueError("adaptive must be False or None with sampling_method rejection")

    @property
    def is_adaptive(self) -> bool:
        default = ADAPTIVE_BY_DEFAULT and self.sampling_method == "coupled"
        return default if self.adaptive is None else self.adaptive

    @property
    def most_draft_tokens(self) -> int:
        return self.num_speculative_tokens or (8 if self.is_adaptive else 4)

    @property
    def shortest_lookup(self) -> int:
        return self.prompt_lookup_min or min(self._shortest, self.prompt_lookup_max)

    @property
    def shortest_match(self) -> int:
        return self.suffix_min_match or self._shortest

    @property
    def _shortest(self) -> int:
        return 1 if self.is_adaptive else 2

    def for_strategy(self, strategy: str) -> SpeculativeConfig:
        """The same for rows that share a batch in this way. A padded rectangle's time depends on its longest
        draft, so there all that is drafted is verified.

        Raises:
            ValueError: it is to be adaptive there.
        """
        if strategy == "packed":
            return self
        if self.adaptive:
            raise ValueError(f"adaptive must be False or None with strategy {strategy}")
        return replace(self, adaptive=False)

    def for_window(self, max_model_len: int) -> SpeculativeConfig:
        """The same for requests of at most so many tokens, in which longer drafts have no room."""
        return replace(self, num_speculative_tokens=min(self.most_draft_tokens, max(1, max_model_len - 2)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Read vLLM's `speculative_config` dictionary.

        Raises:
            ValueError: an unknown key, a missing `method`, or a value out of range.
        """
        _check_keys("speculative_config", values, cls)
        if "method" not in values:
            raise ValueError(f"speculative_config needs the key 'method': one of {', '.join(METHODS)}")
        return cls(**values)


@dataclass(frozen=True)
class PoolConfig:
    """EXSPEC's pool: how many sequences it holds, and how batches are chosen from it.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    window: int | None = None
    """Sequences in the pool; None: four times the batch size."""
    group_by: str = "length"
    """`length`: the largest group of equal length; `acceptance`: the one whose rows were accepted most alike of
    late, so that they are likely to stay together."""
    min_group: int | None = None
    """Fewest rows of equal length that are decoded without the others; None: as many as are predicted to pay,
    which is 92 % of a full batch, as realigning costs at most 8 % of a round and a round's cost hardly depends
    on its rows. 1 means that rows of unequal length never meet."""
    max_wait_rounds: int = 16
    """A sequence that sat out this many rounds is in the next batch, whatever its length; if there are several,
    those that have waited longest go first."""

    def __post_init__(self) -> None:
        for name in ("window", "min_group"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        _check_at_least("max_wait_rounds", self.max_wait_rounds, 1)
        _check_one_of("group_by", self.group_by, GROUPINGS)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PoolConfig:
        """Read a `pool_config` dictionary.

        Raises:
            ValueError: an unknown key, or a value out of range.
        """
        _check_keys("pool_config", values, cls)
        return cls(**values)


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    max_model_len: int
    """Tokens that a request may have, prompt and output together."""
    max_num_seqs: int = 8
    """Rows: sequences that are decoded at the same time."""
    strategy: str = "packed"
    numerics: str = "invariant"
    """`invariant`: a request's tokens do not depend on the others in the batch or on speculation, bit for bit, in
    any dtype. `fast`: up to rounding. The padded strategies are always up to rounding."""
    num_speculative_tokens: int = 0
    """Draft tokens per row and round, at most; 0 without a drafter."""
    refill: bool = True
    """Give the rows of finished sequences to waiting ones; False: only when all have finished (fixed batches)."""
    pool: PoolConfig | None = None
    """For strategy `exspec`; None: the default."""
    seed: int = 0
    """Of requests that name none: with the request's serial number it makes the seed of its noise."""
    sampling_method: str = "coupled"
    """How sampled drafts are judged, see `SpeculativeConfig`."""
    logprobs_mode: str = "raw_logprobs"
    """Log-probabilities of outputs: `raw_logprobs`, of the model's own logits; `processed_logprobs`, of the
    distribution that the token was chosen from (after penalties, bias, temperature and filters)."""

    def __post_init__(self) -> None:
        _check_at_least("max_model_len", self.max_model_len, 2)
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _check_one_of("strategy", self.strategy, STRATEGIES)
        _check_one_of("numerics", self.numerics, NUMERICS)
        _check_one_of("sampling_method", self.sampling_method, SAMPLING_METHODS)
        _check_one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, got {self.seed!r}")
        if not isinstance(self.refill, bool):
            raise ValueError(f"refill must be True or False, got {self.refill!r}")
        if self.pool is not None and self.strategy != "exspec":
            raise ValueError(f"pool_config goes with strategy exspec, not with {self.strategy}")
        window = self.pool.window if self.pool else None
        if window is not None and window < self.max_num_seqs:
            raise ValueError(f"window must be at least max_num_seqs ({self.max_num_seqs}), got {window}")

    @property
    def is_invariant(self) -> bool:
        return self.strategy == "packed" and self.numerics == "invariant"

    @property
    def num_rows(self) -> int:
        """Rows of the cache: a batch, or with EXSPEC a pool from which batches are chosen."""
        if self.strategy != "exspec":
            return self.max_num_seqs
        window = self.pool.window if self.pool else None
        return window or POOL_FACTOR * self.max_num_seqs


def _check_keys(name: str, values: Mapping[str, Any], kind: type[Any]) -> None:
    known = [entry.name for entry in fields(kind)]
    unknown = sorted(set(values) - set(known), key=str)
    if unknown:
        raise ValueError(f"{name} has no key {unknown[0]!r}; allowed are {', '.join(known)}")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
