"""`batchspec bench` and `batchspec bench step` as users run them."""

import json
import re

import pytest
from toy_folders import save_text_llama, text_llama

from batchspec.bench import engines
from batchspec.bench.run import Answer
from batchspec.cli.main import main

METHODS = "none,ngram,num_speculative_tokens=3,prompt_lookup_min=1,transformers,transformers-assisted"
NGRAM = "ngram,num_speculative_tokens=3,prompt_lookup_min=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_llama(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["ab " * count], "category": "xyz"[count % 3]} for count in range(1, 10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bench(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *map(str, arguments)])
    return ended.value.code or 0


@pytest.fixture
def common(model, dataset, tmp_path):
    """A small measurement; options that come later win."""
    small = ["--max-tokens", 12, "--num-prompts", 6, "--repeats", 2, "--batch-sizes", "1,4", "--dtype", "float64"]
    return ["--model", model, "--dataset", dataset, "-o", tmp_path / "out", *small]


def read(folder):
    return json.loads((folder / "bench.json").read_text(), parse_constant=pytest.fail)


FIGURES = {"tokens_per_second", "first_token", "time_per_token", "latency_p50", "latency_p99"}
COUNTS = {"acceptance_rate", "acceptance_by_position", "mean_acceptance_length", "occupancy", "mean_step_tokens"}


def test_a_measurement_is_whole(common, tmp_path, capsys):
    folder = tmp_path / "out"
    assert bench(*common, "--methods", METHODS, "--json", "-") == 0
    said = capsys.readouterr().out.strip().splitlines()
    document = read(folder)
    assert json.loads(said[-1]) == document
    assert document["exit_code"] == 0
    assert {"commit", "torch", "transformers", "machine", "command", "time"} <= document["provenance"].keys()
    names = ["none", NGRAM, "transformers", "transformers-assisted"]
    order = [(run["batch_size"], run["repeat"], run["method"]) for run in document["runs"]]
    assert order == [(size, repeat, name) for size in (1, 4) for repeat in (0, 1) for name in names]
    for run in document["runs"]:
        assert run["num_tokens"] == [12] * 6, "all are paid for the same"
        assert len(run["answers"]) == len(run["latencies"]) == 6
        assert all(
            0 < first <= last for first, last in zip(run["first_token_seconds"], run["latencies"], strict=True)
        )
        assert sum(run["latencies"]) <= run["seconds"] * run["batch_size"] * 1.01
    for row in document["summary"]:
        is_ours = not row["method"].startswith("transformers")
        assert row.keys() > FIGURES | COUNTS
        assert (row["occupancy"] is not None) == is_ours
        assert (row["acceptance_rate"] is not None) == (row["method"] == NGRAM)
        assert row["differs"] == []
        assert row["exact_match"] == 1.0 or not is_ours
        assert set(row["categories"]) == {"x", "y", "z"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "acceptance.png", "bench.html", "bench.json", "throughput.png",
    ]  # fmt: skip
    assert (folder / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(common, tmp_path):
    assert bench(*common, "--methods", "none,ngram", "--batch-sizes", 4, "--repeats", 1) == 0
    html = (tmp_path / "out" / "bench.html").read_text()
    assert not re.search(r"<script|<link|url\(|https?://", html)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]*)', html))
    assert html.count("<img") >= 1
    assert "first token ms" in html


def test_tampered_answers_get_no_speedup_and_exit_code_1(common, tmp_path, capsys, monkeypatch):
    answer = engines.answer_by_engine

    def tampered(engine, workload):
        answers, *others = answer(engine, workload)
        if engine.config.num_speculative_tokens:
            wrong = [*answers[2].token_ids[:-1], 7]
            answers[2] = Answer(wrong, answers[2].first_token_seconds, answers[2].seconds)
        return answers, *others

    monkeypatch.setattr(engines, "answer_by_engine", tampered)
    assert bench(*common, "--methods", "none,ngram", "--batch-sizes", 4) == 1
    said = capsys.readouterr().out
    assert "ngram at batch size 4 differs on prompts 2 (from 0)" in " ".join(said.split())
    none, ngram = read(tmp_path / "out")["summary"]
    assert (none["speedup"]["median"], ngram["speedup"], ngram["differs"]) == (1.0, None, [2])
    line = next(line for line in said.splitlines() if line.strip().startswith("ngram"))
    assert "differs" in line
    assert not re.search(r"\d\.\d\dx", line)


def test_drawn_tokens_are_the_same_with_and_without_drafts(common, tmp_path):
    options = ["--temperature", 0.9, "--methods", "none,ngram,transformers", "--no-ignore-eos", "--max-tokens", 30]
    assert bench(*common, *options) == 0
    answers = {
        tuple(run["answers"]) for run in read(tmp_path / "out")["runs"] if not run["method"].startswith("transf")
    }
    assert len(answers) == 1


def test_a_draft_model_serves_both_sides(common, model, tmp_path):
    options = ["--draft-model", model, "--methods", "none,draft_model,transformers-assisted"]
    assert bench(*common, *options, "--batch-sizes", 2, "--repeats", 1) == 0
    none, drafted, assisted = read(tmp_path / "out")["summary"]
    assert drafted["acceptance_rate"] == 1.0
    assert none["exact_match"] == assisted["exact_match"] == 1.0


def test_a_measurement_that_was_stopped_is_resumed_and_one_of_other_settings_is_not(common, tmp_path, capsys):
    options = [*common, "--methods", "none,ngram"]
    assert bench(*options, "--batch-sizes", 1) == 0
    first = read(tmp_path / "out")
    assert bench(*options) == 2
    assert "holds a measurement; give --resume" in capsys.readouterr().err
    assert bench(*options, "--max-tokens", 13, "--resume") == 2
    assert "was measured with another max_tokens" in capsys.readouterr().err
    assert bench(*options, "--resume") == 0
    second = read(tmp_path / "out")
    assert second["runs"][:4] == first["runs"]
    assert [run["batch_size"] for run in second["runs"]] == [1] * 4 + [4] * 4
    assert len(second["resumed"]) == 1
    del second["runs"][1]  # as if it had been killed in between
    (tmp_path / "out" / "bench.json").write_text(json.dumps(second))
    assert bench(*options, "--resume") == 0
    keys = sorted((run["batch_size"], run["method"], run["repeat"]) for run in read(tmp_path / "out")["runs"])
    assert keys == [(size, name, repeat) for size in (1, 4) for name in ("ngram", "none") for repeat in (0, 1)]
    whole = read(tmp_path / "out")
    run = whole["runs"][0]
    damaged = [{**run, name: value} for name, value in [("seconds", 0), ("repeat", None), ("latencies", [])]]
    damaged += [{**run, "method": "magic"}, {**run, "batch_size": -4}, {}]
    documents = [{**whole, "runs": [one]} for one in damaged]
    for document in [*documents, {**whole, "runs": {}}, {**whole, "resumed": 3}, {"runs": [{}], "settings": {}}]:
        (tmp_path / "out" / "bench.json").write_text(json.dumps(document))
        assert bench(*options, "--resume") == 2, document
        assert "is no measurement of this batchspec bench" in capsys.readouterr().err
    assert bench(*options, "--overwrite", "--batch-sizes", 1, "--repeats", 1) == 0
    assert len(read(tmp_path / "out")["runs"]) == 2


def test_what_could_not_be_run_is_not_taken_for_answers_that_differ(common, monkeypatch, capsys):
    def without_memory(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("batchspec.bench.engines.make_llm", without_memory)
    assert bench(*common, "--methods", "none") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: can't allocate memory"


def test_ctrl_c_leaves_what_is_there(common, tmp_path, monkeypatch):
    answer, calls = engines.answer_by_engine, []

    def interrupted(engine, workload):
        calls.append(1)
        if len(calls) == 4:  # two warm-ups and a run
            raise KeyboardInterrupt
        return answer(engine, workload)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "answer_by_engine", interrupted)
        assert bench(*common, "--methods", "none,ngram", "--batch-sizes", 4) == 130
    document = read(tmp_path / "out")
    assert (document["stopped"], len(document["runs"])) == (True, 1)
    assert bench(*common, "--methods", "none,ngram", "--batch-sizes", 4, "--resume") == 0
    assert not read(tmp_path / "out")["stopped"]


def test_a_model_of_random_weights_is_timed_with_synthetic_acceptance(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(text_llama().config.to_json_string(use_diff=False))
    data = tmp_path / "out.json"
    options = [
        "--random-weights",
        config,
        "--dataset",
        "synthetic:in=12,out=64",
        "--num-prompts",
        8,
        "--json",
        data,
    ]
    assert bench(*options, "--acceptance", 0.7, "--methods", "none,ngram", "--batch-sizes", 4, "--repeats", 1) == 0
    assert "say nothing of a real drafter" in " ".join(capsys.readouterr().out.split())
    document = json.loads(data.read_text())
    assert document["settings"]["prompt_lengths"] == [12] * 8
    none, ngram = document["summary"]
    assert ngram["acceptance_by_position"][0] == pytest.approx(0.7, abs=0.15)
    assert none["exact_match"] is ngram["exact_match"] is None
    assert ngram["speedup"] is not None, "nothing is compared"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "vllm"], "--methods must be of none, "),
        (["--methods", "none,ngram,numerics=exact"], "numerics must be one of invariant, fast"),
        (["--methods", "none", "--baseline", "ngram"], "--baseline must be one of the methods none, got 'ngram'"),
        (["--batch-sizes", "1,x"], "--batch-sizes must be numbers of at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--num-prompts", "99"], "--num-prompts must be at most 9"),
        (["--max-tokens", "999"], "must be less than the context window"),
        (["--temperature", "-1"], "temperature must be a number"),
        (["--acceptance", "1.5"], "--acceptance must be a number from 0 to 1"),
        (["--acceptance", "0.5"], "--acceptance goes with our methods"),
        (["--acceptance", "0.5", "--no-ignore-eos"], "--acceptance goes with --ignore-eos"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--dataset", "synthetic:in=0,out=5"], "--dataset must be a file or synthetic:in=128,out=128"),
        (["--dataset", "synthetic:in=200,out=100"], "in and out must be at most 256 together"),
        (["--dataset", "nowhere.jsonl"], "'nowhere.jsonl' cannot be read"),
        (["--random-weights", "nowhere"], "--random-weights has no tokenizer"),
        (["--json", "/nowhere/out.json"], "must be a file in a folder that exists"),
    ],
)
def test_a_bad_option_is_one_line_and_writes_nothing(common, tmp_path, capsys, options, message):
    assert bench(*common, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "1"], "--dataset must be given"),
        (["--dataset", "x", "paper", "--dataset", "x", "-o", "y"], "--dataset goes without the command paper"),
        (["--dataset", "x", "--resume"], "--resume and --overwrite go with --output"),
        (
            ["--random-weights", "nowhere", "--dataset", "synthetic:in=4,out=4"],
            "'nowhere' must be the config.json of a causal language model",
        ),
        (["step", "--sizes", "3", "--columns", "2"], "--sizes must be multiples of --columns (2), got 3"),
        (["step", "--context", "0"], "--context must be at least 1"),
        (["step", "--numerics", "exact"], "--numerics must be one of invariant, fast"),
    ],
)
def test_other_bad_options_are_one_line_too(capsys, arguments, message):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_steps_are_held_against_their_floor(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("batchspec.bench.roofline.COPIED_BYTES", 1 << 22)
    monkeypatch.setattr("batchspec.bench.roofline.MATRIX_SIZE", {"cpu": 128})
    options = ["--sizes", "2,4", "--columns", 2, "--context", 16, "--repeats", 2, "-o", tmp_path / "out"]
    assert bench("step", "--model", model, "--dtype", "float32", *options) == 0
    assert "GB/s of memory" in " ".join(capsys.readouterr().out.split())
    document = json.loads((tmp_path / "out" / "step.json").read_text())
    assert [row["num_tokens"] for row in document["steps"]] == [2, 4]
    assert document["machine"]["bandwidth"] > 0
    assert (tmp_path / "out" / "step.png").read_bytes().startswith(b"\x89PNG")
    assert bench("step", "--model", model, *options) == 2


def test_help_teaches_with_an_example(capsys):
    assert bench("--help") == 0
    said = capsys.readouterr().out
    assert "batchspec bench --dataset" in said
    assert all(command in said for command in ("paper", "step"))
