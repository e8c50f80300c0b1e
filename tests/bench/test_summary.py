"""Figures of runs whose outcome is known, and the refusal to call other text faster."""

import io
import json

import pytest
from rich.console import Console

from batchspec.bench.cells import category_table
from batchspec.bench.document import finish
from batchspec.bench.equality import find_reference, prompts_that_differ
from batchspec.bench.methods import parse_methods
from batchspec.bench.page import html_page
from batchspec.bench.run import Answer, Run, digest, make_run, runs_of
from batchspec.bench.summary import summarise
from batchspec.bench.tables import tables
from batchspec.drafting.costs import StepCosts
from batchspec.provenance import provenance
from batchspec.stats import EngineStats

METHODS = ["none", "ngram", "transformers"]
CATEGORIES = ["a", "b", "a"]
TEXTS = [[1, 2, 3], [4, 5, 6, 7], [8]]


def run_of(method="none", seconds=2.0, repeat=0, batch_size=2, texts=TEXTS, stats=None) -> Run:
    answers = [Answer(tokens, 0.5, 0.5 + len(tokens) - 1) for tokens in texts]
    if method != "transformers":
        stats = stats or EngineStats(num_steps=4, num_row_rounds=8, num_rounds=6)
    return make_run(method, batch_size, repeat, seconds, 1 << 20, answers, stats, [StepCosts([(1, 0.5)])])


def summary_of(*runs, baseline="none", is_checked=True):
    rows = summarise(runs, parse_methods(METHODS), CATEGORIES, baseline, is_checked)
    return {(row["batch_size"], row["method"]): row for row in rows}


def document_of(*runs):
    settings = {
        "model": "<model>", "dtype": "float32", "device": "cpu", "draft_model": None, "methods": METHODS,
        "baseline": "none", "acceptance": None, "dataset": "<data>", "prompt_lengths": [3, 5, 4],
        "categories": CATEGORIES, "max_tokens": 4, "temperature": 0.0, "ignore_eos": False, "repeats": 3,
    }  # fmt: skip
    runs = [run.as_json() for run in runs]
    return finish({"provenance": provenance(), "settings": settings, "runs": runs}, is_stopped=False)


def test_tokens_are_counted_alike_for_every_method():
    ours, theirs = run_of("none"), run_of("transformers")
    assert ours.num_tokens == theirs.num_tokens == [3, 4, 1]
    assert ours.tokens_per_second == theirs.tokens_per_second == 4.0
    assert theirs.drafting is None


def test_figures_of_one_run():
    run = run_of()
    assert run.first_token == 0.5
    assert run.time_per_token == 1.0, "a request of one token has none behind the first"
    assert (run.latency_p50, run.latency_p99) == (2.5, 3.5)
    assert run.rates_by_category(CATEGORIES) == {"a": 4 / 3.0, "b": 4 / 3.5}


def test_speedups_are_taken_repeat_by_repeat():
    seconds = {"none": (4.0, 8.0, 6.0), "ngram": (2.0, 2.0, 6.0)}
    runs = [run_of(name, times[repeat], repeat) for repeat in range(3) for name, times in seconds.items()]
    speedup = summary_of(*runs)[2, "ngram"]["speedup"]
    assert speedup == {"median": 2.0, "low": 1.0, "high": 4.0}


def test_a_speedup_needs_the_baseline_of_the_same_repeat():
    runs = [run_of("none", 4.0, 0), run_of("ngram", 2.0, 0), run_of("ngram", 1.0, 1)]
    assert summary_of(*runs)[2, "ngram"]["speedup"]["high"] == 2.0
    assert summary_of(*runs[1:])[2, "ngram"]["speedup"] is None


OTHER = [[1, 2, 3], [4, 5, 6, 9], [8]]


def test_other_tokens_have_no_speedup_where_equality_is_promised():
    rows = summary_of(run_of("none"), run_of("ngram", 1.0, texts=OTHER), run_of("transformers", 1.0, texts=OTHER))
    ngram, theirs = rows[2, "ngram"], rows[2, "transformers"]
    assert (ngram["differs"], ngram["speedup"], ngram["is_speedup_refused"]) == ([1], None, True)
    assert ngram["categories"]["a"]["speedup"] is None
    assert (theirs["differs"], theirs["speedup"]["median"]) == ([], 2.0)
    assert theirs["exact_match"] == pytest.approx(2 / 3)


def test_equality_is_asked_of_every_repeat_and_at_every_batch_size():
    runs = [run_of("none"), run_of("ngram"), run_of("ngram", repeat=1, texts=OTHER)]
    runs += [run_of("none", batch_size=8, texts=OTHER)]
    methods = parse_methods(METHODS)
    found = prompts_that_differ(runs, methods, find_reference(runs, methods))
    assert found == {("ngram", 2): [1], ("none", 8): [1]}


def test_nothing_is_faster_than_a_baseline_of_other_text():
    rows = summary_of(run_of("none"), run_of("ngram", texts=OTHER), run_of("transformers"), baseline="ngram")
    assert rows[2, "transformers"]["speedup"] is None


def test_without_none_the_first_exact_method_is_the_reference():
    runs = [run_of("transformers", texts=OTHER), run_of("ngram")]
    reference = find_reference(runs, parse_methods(METHODS[1:]))
    assert (reference.method, reference.is_none) == ("ngram", False)


def test_unchecked_runs_are_not_compared():
    row = summary_of(run_of("none"), run_of("ngram", texts=OTHER), is_checked=False)[2, "ngram"]
    assert row["speedup"]["median"] == 1.0
    assert row["exact_match"] is None


def test_acceptance_is_told_by_place_and_empty_where_nothing_drafts():
    stats = EngineStats(num_steps=2, num_row_rounds=4)
    stats.count_round(num_draft_tokens=2, num_accepted_tokens=1, num_output_tokens=2)
    stats.count_round(num_draft_tokens=1, num_accepted_tokens=1, num_output_tokens=2)
    rows = summary_of(run_of("none"), run_of("ngram", stats=stats), run_of("transformers"))
    ngram = rows[2, "ngram"]
    assert ngram["acceptance_by_position"] == [1.0, 0.0]
    assert (ngram["acceptance_rate"], ngram["mean_acceptance_length"]) == (2 / 3, 2.0)
    assert (ngram["occupancy"], ngram["mean_step_tokens"]) == (0.5, 2.5)
    assert rows[2, "none"]["acceptance_rate"] is None
    assert rows[2, "transformers"]["occupancy"] is None


def test_differing_answers_are_exit_code_1_and_named_everywhere():
    document = document_of(run_of("none"), run_of("ngram", 1.0, texts=OTHER))
    assert document["exit_code"] == 1
    assert "ngram at batch size 2 differs on prompts 1" in document["remarks"][0]
    console = Console(width=100, record=True, file=io.StringIO())
    for table in tables(document):
        console.print(table)
    assert "2.00x" not in (text := console.export_text())
    assert "differs" in text
    html = html_page(document, {})
    assert '<span class="violation">differs</span>' in html
    assert "2.00x" not in html


def test_a_document_comes_back_from_its_json_and_holds_no_markup():
    document = document_of(run_of("none"), run_of("ngram"), run_of("transformers"))
    assert document["exit_code"] == 0
    again = json.loads(json.dumps(document))
    assert runs_of(again) == [run_of("none"), run_of("ngram"), run_of("transformers")]
    html = html_page(again, {"throughput.png": b"png"})
    assert "<model>" not in html
    assert "&lt;model&gt;" in html


def test_categories_have_a_line_for_each_batch_size():
    rows = document_of(run_of("none"), run_of("ngram", 1.0))["summary"]
    heads, lines = category_table(rows, "none")
    assert heads == ["category", "batch", "none", "ngram"]
    assert lines == [["a", "2", "1.3", "1.00x"], ["b", "2", "1.1", "1.00x"]]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_are_whole_on_a_narrow_terminal(width):
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables(
        document_of(*(run_of(name, 1.0 + repeat, repeat) for name in METHODS for repeat in (0, 1)))
    ):
        console.print(table)
    assert "…" not in (text := console.export_text())
    assert text.count("transformers") >= 4


def test_digests_tell_token_ids_apart():
    assert digest([1, 2]) == digest([1, 2]) != digest([12])
