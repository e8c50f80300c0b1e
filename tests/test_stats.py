"""Counters of drafts by place."""

from dataclasses import replace

from toy_llm import new_llm

from batchspec import SamplingParams
from batchspec.stats import DecodingStats


def test_adding_to_a_copy_leaves_the_original_as_it_is():
    stats = DecodingStats()
    stats.count_round(num_draft_tokens=2, num_accepted_tokens=1, num_output_tokens=2)
    total = replace(stats)
    total.add(stats)
    assert (total.num_drafted_at, total.num_accepted_at) == ([2, 2], [2, 0])
    assert (stats.num_drafted_at, stats.num_accepted_at) == ([1, 1], [1, 0])


def test_an_engine_counts_drafts_by_place_and_tokens_of_its_steps():
    engine = new_llm("unrelated", max_num_seqs=3).engine
    for name, prompt in enumerate(([1, 2, 3], [4, 5], [6])):
        engine.add_request(str(name), prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    num_tokens = []
    forward = engine.runner.forward
    engine.runner.forward = lambda step, *rest: num_tokens.append(step.num_tokens) or forward(step, *rest)
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.stats == engine.stats, "reading changes nothing"
    stats = engine.stats
    assert sum(stats.num_drafted_at) == stats.num_draft_tokens > 0
    assert sum(stats.num_accepted_at) == stats.num_accepted_tokens
    assert stats.num_drafted_at[0] == stats.num_drafts
    assert stats.mean_step_tokens == sum(num_tokens) / stats.num_steps
