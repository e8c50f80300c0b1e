"""From a speculative configuration to a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchspec.config import SpeculativeConfig
from batchspec.drafting.budget import AdaptiveBudget, Budget, FixedBudget
from batchspec.drafting.combined import CombinedDrafter
from batchspec.drafting.costs import StepCosts
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.drafter import Drafter, NoDrafter
from batchspec.drafting.feature import FeatureDrafter
from batchspec.drafting.ngram import NgramDrafter
from batchspec.drafting.suffix import SuffixDrafter
from batchspec.drafting.suffix_store import SuffixStore
from batchspec.models.capability import check_support, make_runner
from batchspec.models.features import FeatureStore, is_feature_draft
from batchspec.models.loader import context_length, vocabulary_size
from batchspec.models.pairing import load_draft_model
from batchspec.models.runner import FeatureRunner, PackedRunner, Runner
from batchspec.models.shallow import num_layers, with_layers
from batchspec.models.short_head import head_ids
from batchspec.models.step_timing import measure_draft, measure_target
from batchspec.sampling.method import SAMPLING_METHODS
from batchspec.stats import StageTimer


@dataclass(frozen=True)
class Target:
    """What a drafter has to fit, and how it is to be run."""

    runner: Runner
    tokenizer: Any
    strategy: str
    """A draft model runs by the same strategy as its target."""
    timer: StageTimer


def build_drafter(config: SpeculativeConfig | None, target: Target) -> Drafter:
    """Make the drafter that the configuration names; without a configuration one that never drafts.

    Raises:
        ValueError: the draft model cannot be loaded, cannot run by the strategy, or has another tokenizer.
    """
    if config is None:
        return NoDrafter(target.runner.device)
    if config.method in LOOKUPS:
        return LOOKUPS[config.method](config, target)
    drafter = MODELS[config.method](config, target)
    return drafter if config.lookup is None else CombinedDrafter(LOOKUPS[config.lookup](config, target), drafter)


def make_budget(config: SpeculativeConfig, target: Target, draft: Runner | None = None) -> Budget:
    """How much is drafted; `draft` runs the draft model, if there is one."""
    if not config.is_adaptive:
        return FixedBudget()
    most = target.runner.num_rows * (1 + config.most_draft_tokens)
    target_costs = StepCosts(*measure_target(target.runner, most))
    if draft is None:
        return AdaptiveBudget(target_costs)
    # Twice as many tokens as rows: those whose drafts were all accepted are one token behind.
    return AdaptiveBudget(target_costs, StepCosts(measure_draft(draft, 2 * draft.num_rows)))


def _build_ngram(config: SpeculativeConfig, target: Target) -> Drafter:
    runner, sizes = target.runner, (config.prompt_lookup_max, config.shortest_lookup)
    return NgramDrafter(runner.num_rows, *sizes, runner.device, make_budget(config, target))


def _build_suffix(config: SpeculativeConfig, target: Target) -> Drafter:
    store = SuffixStore(config.suffix_store_tokens) if config.suffix_store_tokens else None
    return SuffixDrafter(config.shortest_match, target.runner.device, store, make_budget(config, target))


def _build_draft_model(config: SpeculativeConfig, target: Target) -> DraftModelDrafter:
    draft = load_draft_model(config.model, target.runner.model, target.tokenizer)
    build = _drafting_by_features if is_feature_draft(draft) else _drafting_with
    return build(draft, config, target)


def _drafting_by_features(draft: Any, config: SpeculativeConfig, target: Target) -> DraftModelDrafter:
    if target.strategy != "packed" or not isinstance(target.runner, PackedRunner):
        raise ValueError(f"a draft model of kind feature needs strategy packed, got {target.strategy}")
    check_support("packed", draft, target.runner.max_length)
    target.runner.features = FeatureStore(target.runner.model)
    runner = FeatureRunner(draft, target.runner.num_rows, target.runner.max_length)
    draw = SAMPLING_METHODS[config.sampling_method].draw
    budget = make_budget(config, target, runner)
    return FeatureDrafter(runner, target.runner.features, vocabulary_size(draft), draw, head_ids(draft), budget)


def _build_early_exit(config: SpeculativeConfig, target: Target) -> DraftModelDrafter:
    count, most = config.num_layers or 0, num_layers(target.runner.model) - 1
    if count > most:
        raise ValueError(f"num_layers must be at most {most}, fewer layers than the target has, got {count}")
    return _drafting_with(with_layers(target.runner.model, range(count)), config, target)


def _drafting_with(draft: Any, config: SpeculativeConfig, target: Target) -> DraftModelDrafter:
    window = min(context_length(draft) or target.runner.max_length, target.runner.max_length)
    runner = make_runner(target.strategy, draft, target.runner.num_rows, window, target.timer)
    draw = SAMPLING_METHODS[config.sampling_method].draw
    sizes = vocabulary_size(draft), vocabulary_size(target.runner.model)
    return DraftModelDrafter(runner, *sizes, draw, head_ids(draft), make_budget(config, target, runner))


LOOKUPS: dict[str, Callable[[SpeculativeConfig, Target], Drafter]] = {
    "ngram": _build_ngram,
    "suffix": _build_suffix,
}
MODELS: dict[str, Callable[[SpeculativeConfig, Target], DraftModelDrafter]] = {
    "draft_model": _build_draft_model,
    "early_exit": _build_early_exit,
}
