"""`batchspec audit` as users run it, and the reports that it writes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from fake_server import choice, fake_server

from batchspec.audit import local_engines, run, session
from batchspec.audit.compare import Divergence, Outcome
from batchspec.audit.document import make_document
from batchspec.audit.page import html_page
from batchspec.audit.run import Run
from batchspec.audit.session import Found
from batchspec.cli.main import main
from batchspec.documents import as_json
from batchspec.models.reference import forced_logits


def audit(*arguments):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(["audit", *map(str, arguments)])
    return ended.value.code or 0


@pytest.fixture
def common(folder, dataset):
    return ["--model", folder, "--dataset", dataset, "--max-tokens", 12]


def test_faithful_engines_pass_and_the_reports_are_whole(common, tmp_path, capsys):
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    engines = ["batchspec:method=ngram,num_speculative_tokens=3", "batchspec:strategy=eqspec,method=ngram"]
    engines += ["transformers", "transformers-assisted"]
    candidates = [part for engine in engines for part in ("--candidate", engine)]
    options = ["--batch-sizes", "1,4", "--dtype", "float64", "--report", page, "--json", data]
    assert audit(*common, *candidates, *options) == 0
    assert "No violation" in capsys.readouterr().out
    found = json.loads(data.read_text(), parse_constant=pytest.fail)  # neither NaN nor Infinity
    assert [(run["candidate"], run["batch_size"]) for run in found["runs"][1:]] == [
        (engine, size) for engine in engines for size in (1, 4)
    ]
    assert all(run["figures"]["exact"]["value"] == 1.0 for run in found["runs"])
    assert found["settings"]["dtype"] == "float64"
    assert {"torch", "transformers", "commit", "command"} <= found["provenance"].keys()
    num_tokens = sum(map(len, found["references"]))
    assert num_tokens == sum(map(len, found["margins"])) == found["noise_floor"]["num_positions"]
    html = page.read_text()
    assert not re.search(r"<script|<link|<img|src=|url\(|https?://(?!www\.w3\.org/2000/svg)", html)
    assert "noise floor" in html
    assert "<svg" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json", "prompts.jsonl"]


def test_a_draft_model_is_named_by_its_path(common, folder, tmp_path):
    data = tmp_path / "out.json"
    engines = [f"transformers-assisted:model={folder},num_speculative_tokens=3"]
    engines += [f"batchspec:method=draft_model,model={folder}"]
    candidates = [part for engine in engines for part in ("--candidate", engine)]
    assert audit(*common, *candidates, "--batch-sizes", 3, "--json", data) == 0
    assert [run["counts"]["identical"] for run in json.loads(data.read_text())["runs"]] == [6, 6, 6]


def test_a_violation_is_exit_code_1_and_is_marked(common, tmp_path, capsys):
    page = tmp_path / "out.html"
    with fake_server(lambda body: choice([1, 2, 3], finish_reason="length")) as url:
        assert audit(*common, "--candidate", f"openai:{url},model=m", "--batch-sizes", 2, "--report", page) == 1
    assert "Violation" in capsys.readouterr().out
    html = page.read_text()
    assert 'class="verdict code1"' in html
    assert html.count('<circle class="violation"') == 6


def test_nothing_but_errors_is_exit_code_2(common, capsys):
    assert audit(*common, "--candidate", "openai:http://127.0.0.1:9,model=m", "--batch-sizes", 1) == 2
    assert "Could not run" in capsys.readouterr().out


def test_sampling_is_audited_on_demand(common, tmp_path):
    data = tmp_path / "out.json"
    options = ["--sampling", "--samples", 12, "--num-prompts", 2, "--batch-sizes", 8, "--json", data]
    candidates = ["--candidate", "batchspec:method=ngram", "--candidate", "transformers-assisted"]
    assert audit(*common, *candidates, *options) == 0
    first, second = json.loads(data.read_text())["sampling"]
    assert (first["against"], second["against"]) == (
        "the same engine without speculation",
        "the target alone by transformers",
    )
    assert len(first["tests"]) == 4 + 4 * 2
    assert first["level"] == 0.005


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--candidate", "vllm"], "--candidate must begin with one of"),
        (["--candidate", "batchspec:strategy=fast"], "strategy must be one of packed, eqspec, exspec"),
        (["--candidate", "transformers-assisted:model=./nowhere"], "there is no folder"),
        (["--candidate", "transformers", "--batch-sizes", "0"], "--batch-sizes must be numbers of at least 1"),
        (["--candidate", "transformers", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--candidate", "transformers", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--candidate", "transformers", "--max-tokens", "999"], "must be less than the context window"),
        (["--candidate", "transformers", "--sampling", "--temperature", "0"], "--temperature must be above 0"),
        (["--candidate", "transformers", "--sampling", "--temperature", "-1"], "temperature must be a number"),
        (["--candidate", "transformers", "--report", "/nowhere/out.html"], "must be a file in a folder that"),
        (
            ["--candidate", "transformers-assisted:num_speculative_tokens=0"],
            "num_speculative_tokens must be an integer of at least 1",
        ),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(common, capsys, options, message):
    assert audit(*common, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_report_does_not_go_where_something_else_is(common, tmp_path, capsys):
    out = tmp_path / "out"
    dataset = common[common.index("--dataset") + 1]
    before = Path(dataset).read_text()
    assert audit(*common, "--candidate", "transformers", "--json", dataset) == 2
    assert "--json must not be the --dataset" in capsys.readouterr().err
    assert audit(*common, "--candidate", "transformers", "--json", out, "--report", out) == 2
    assert "--json must not be the --report" in capsys.readouterr().err
    assert Path(dataset).read_text() == before
    assert not out.exists()


def test_an_engine_that_breaks_down_is_an_error_for_its_batch_only(common, tmp_path, monkeypatch):
    generate, calls = local_engines.generate_batch, []

    def broken(model, prompts, *arguments, **settings):
        calls.append(len(prompts))
        if len(calls) == 4:  # after the null band, which takes two batches of four
            raise RuntimeError("out of <memory>")
        return generate(model, prompts, *arguments, **settings)

    monkeypatch.setattr(local_engines, "generate_batch", broken)
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    options = ["--batch-sizes", 4, "--json", data, "--report", page]
    assert audit(*common, "--candidate", "transformers", *options) == 0
    last = json.loads(data.read_text())["runs"][-1]
    assert last["counts"] == {"identical": 4, "near-tie": 0, "violation": 0, "error": 2}
    assert "RuntimeError: out of &lt;memory&gt;" in page.read_text()


def test_an_audit_that_breaks_off_is_exit_code_2_and_keeps_what_is_there(common, tmp_path, monkeypatch, capsys):
    """Exit code 1 would mean violations."""
    compare, calls = run.compare, []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == 9:  # behind the null band's six
            raise RuntimeError("the <disk> is full.\nand so on")
        return compare(*arguments)

    monkeypatch.setattr(run, "compare", broken)
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    options = ["--batch-sizes", 1, "--json", data, "--report", page]
    assert audit(*common, "--candidate", "transformers", *options) == 2
    found = json.loads(data.read_text())
    assert (found["exit_code"], found["crash"]) == (2, "RuntimeError: the <disk> is full.")
    assert len(found["runs"][-1]["outcomes"]) == 2
    said = "Could not run: the audit broke off with RuntimeError: the <disk> is full. So far: 2 identical"
    assert found["verdict"].startswith(said)
    assert said in " ".join(capsys.readouterr().out.split())
    assert "RuntimeError: the &lt;disk&gt; is full." in page.read_text()


def test_a_candidate_that_breaks_down_when_it_is_opened_is_one_line_and_exit_code_2(common, monkeypatch, capsys):
    def broken(*arguments):
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(local_engines, "make_llm", broken)
    assert audit(*common, "--candidate", "batchspec") == 2
    assert capsys.readouterr().err == "error: --candidate 'batchspec': MemoryError: no room for the copy\n"


def test_a_target_of_no_numbers_is_exit_code_2_with_whole_reports(common, tmp_path, monkeypatch, capsys):
    def overflown(model, rows):
        return [torch.full_like(row, float("nan")) for row in forced_logits(model, rows)]

    monkeypatch.setattr(session, "forced_logits", overflown)
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    assert audit(*common, "--candidate", "transformers", "--report", page, "--json", data) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "own logits in float64 are no numbers; audit in another dtype" in said
    assert json.loads(data.read_text())["noise_floor"] is None
    assert 'class="verdict code2"' in page.read_text()


EVIL = "<script>alert(1)</script>&\"'"


def test_no_text_becomes_markup(target):
    divergence = Divergence(3, 5, 6, 0.1, float("inf"), EVIL, EVIL, EVIL)
    outcomes = [
        Outcome(0, "violation", 3, 4, divergence),
        Outcome(1, "error", error=EVIL),
    ]
    settings = {"model": EVIL, "dataset": EVIL, "candidates": [EVIL], "batch_sizes": [1]}
    found = make_document(target, settings, Found(runs=[Run(EVIL, 1, outcomes)]))
    found["remarks"].append(EVIL)
    found["provenance"]["command"] = [EVIL]
    html = html_page(found)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 9
    tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)
            assert all(EVIL not in (value or "") for _, value in attrs)

    Reader().feed(html)
    assert "script" not in tags
    assert json.loads(as_json(found))["runs"][0]["outcomes"][0]["divergence"]["shortfall"] is None


def test_ctrl_c_leaves_reports_of_what_is_there(common, tmp_path):
    """The server answers two prompts and then none; Ctrl-C does not wait for it."""
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    asked = []

    def complete(body):
        asked.append(body)
        if len(asked) > 2:
            time.sleep(3)
        return choice([1, 2])

    with fake_server(complete) as url:
        command = [sys.executable, "-m", "batchspec.cli.main", "audit", *map(str, common)]
        command += ["--candidate", f"openai:{url},model=m", "--batch-sizes", "1"]
        process = subprocess.Popen(
            [*command, "--report", page, "--json", data],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A shell that runs the tests in the background has its children ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(600):
            if len(asked) > 2:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped before the end" in said
    found = json.loads(data.read_text())
    assert found["stopped"]
    assert len(found["runs"][-1]["outcomes"]) == 2
    assert "Stopped before the end" in page.read_text()
