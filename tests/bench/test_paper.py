"""The figures of `batchspec bench paper`, from runs whose outcome is known."""

import io
import json

import pytest
from rich.console import Console
from toy_folders import save_text_llama
from toy_models import PADDED_FAMILIES, make_model_of
from toy_text import byte_tokenizer

from batchspec.bench.paper import STAGES, Run
from batchspec.bench.paper_report import median_share, speedup, tables
from batchspec.cli.main import main
from batchspec.engine import Engine


def run_of(arm="eqspec", batch_size=2, repeat=0, seconds=2.0, **stages):
    return Run(
        arm=arm,
        batch_size=batch_size,
        repeat=repeat,
        seconds=seconds,
        num_tokens=100,
        exact=1.0,
        partial=1.0,
        num_steps=10,
        occupancy=1.0,
        grouping_rate=0.5,
        acceptance_rate=0.5,
        mean_acceptance_length=2.0,
        waited_p50=0,
        waited_p99=3,
        stage_seconds={name.replace("__", "/"): value for name, value in stages.items()},
    )


def test_time_is_charged_to_realigning_wherever_it_happens_and_prefill_is_no_part_of_a_round():
    run = run_of(
        draft=1.0, draft__realign=0.1, draft__append=0.2, verify=2.0, verify__realign=0.3, verify__append=0.4,
        prefill=5.0, prefill__append=1.0, rest=0.25, grouping=0.05,
    )  # fmt: skip
    assert run.stage("realign") == pytest.approx(0.4)
    assert run.stage("append") == pytest.approx(0.6)
    assert run.stage("draft") == 1.0
    assert sum(run.share(stage) for stage in STAGES) == pytest.approx(1.0)
    assert run.share("realign") == pytest.approx(0.4 / 4.3)
    assert run.prefill_share == pytest.approx(6.0 / 10.3)
    assert run.milliseconds_per_verification == pytest.approx(270)
    assert run.overhead_per_token == pytest.approx(1000 * 1.3 / 100)


def test_speedups_are_taken_repeat_by_repeat():
    arms = {
        "none": [run_of("none", repeat=repeat, seconds=seconds) for repeat, seconds in enumerate((4.0, 8.0, 6.0))],
        "packed": [
            run_of("packed", repeat=repeat, seconds=seconds) for repeat, seconds in enumerate((2.0, 2.0, 6.0))
        ],
    }
    assert speedup(arms, "packed") == 2.0


def test_medians_are_those_of_the_repeats():
    runs = [run_of(verify=verify, realign=1.0) for verify in (1.0, 3.0, 9.0)]
    assert median_share(runs, "realign") == 0.25
    assert [table.row_count for table in tables(runs)] == [1, 1, 1]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_are_whole_on_a_narrow_terminal(width):
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables([run_of("eqspec-refilled", batch_size=128, verify=1.0), run_of("none", verify=1.0)]):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert text.count("eqspec-refilled") == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_llama(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab " * count}) + "\n" for count in range(1, 9)))
    return path


def bench(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "paper", *map(str, arguments)])
    return ended.value.code or 0


def common(model, dataset, folder):
    return [
        "--model", model, "--dataset", dataset, "-o", folder, "--draft-noise", 0.1, "--num-prompts", 6,
        "--max-tokens", 8, "--dtype", "float64",
    ]  # fmt: skip


ALL_ARMS = "none,packed,eqspec,eqspec-refilled,exspec-fixed,exspec"


def test_all_arms_say_what_the_target_says_and_the_report_is_whole(model, dataset, tmp_path, capsys):
    folder = tmp_path / "out"
    options = [*common(model, dataset, folder), "--batch-sizes", "1,3", "--repeats", 2, "--arms", ALL_ARMS]
    assert bench(*options) == 0
    document = json.loads((folder / "paper.json").read_text())
    assert {"commit", "torch", "transformers", "machine", "command", "time"} <= document["provenance"].keys()
    assert document["settings"]["dtype"] == "float64"
    assert len(document["runs"]) == 2 * 6 * 2
    for run in document["runs"]:
        assert run["exact"] == run["partial"] == 1.0
        assert run["num_tokens"] == sum(map(len, document["references"]))
        assert sum(run["shares"].values()) == pytest.approx(1.0)
        is_padded, is_batch = run["arm"].startswith("e"), run["batch_size"] > 1
        assert (run["shares"]["append"] > 0) == is_padded
        assert run["shares"]["realign"] == 0 if not is_padded else run["shares"]["realign"] > 0 or not is_batch
    rounds = {run["arm"]: run["num_steps"] for run in document["runs"] if run["batch_size"] == 1}
    assert len({rounds[arm] for arm in rounds if arm != "none"}) == 1, "at batch 1 all do the same rounds"
    for name in ("throughput.png", "time.png", "grouping.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "exspec-fixed" in capsys.readouterr().out


def test_a_measurement_that_was_stopped_is_resumed_and_one_of_other_settings_is_not(
    model, dataset, tmp_path, capsys
):
    folder = tmp_path / "out"
    options = [*common(model, dataset, folder), "--arms", "none,packed", "--repeats", 1]
    assert bench(*options, "--batch-sizes", "2") == 0
    first = json.loads((folder / "paper.json").read_text())
    assert bench(*options, "--batch-sizes", "2,3") == 2
    assert "holds a measurement; give --resume" in capsys.readouterr().err
    assert bench(*options, "--batch-sizes", "2,3", "--max-tokens", 9, "--resume") == 2
    assert "was measured with another max_tokens" in capsys.readouterr().err
    assert bench(*options, "--batch-sizes", "2,3", "--resume") == 0
    second = json.loads((folder / "paper.json").read_text())
    assert [run["batch_size"] for run in second["runs"]] == [2, 2, 3, 3]
    assert second["runs"][:2] == first["runs"]
    assert len(second["resumed"]) == 1
    del second["runs"][1]  # as if it had been killed in between
    (folder / "paper.json").write_text(json.dumps(second))
    assert bench(*options, "--batch-sizes", "2,3", "--resume") == 0
    third = json.loads((folder / "paper.json").read_text())
    assert sorted((run["batch_size"], run["arm"]) for run in third["runs"]) == [
        (2, "none"), (2, "packed"), (3, "none"), (3, "packed"),
    ]  # fmt: skip
    (folder / "paper.json").write_text('{"runs": [{}], "settings": {}}')
    assert bench(*options, "--batch-sizes", "2,3", "--resume") == 2
    assert "is no measurement of this batchspec bench paper" in capsys.readouterr().err


def test_by_length_runs_the_longest_prompts_first_and_compares_the_same(model, dataset, tmp_path, monkeypatch):
    started = []
    add_sequence = Engine.add_sequence

    def note(engine, sequence):
        started.append(sequence.num_prompt_tokens)
        add_sequence(engine, sequence)

    monkeypatch.setattr(Engine, "add_sequence", note)
    for options, order in (([], sorted), (["--by-length"], lambda lengths: sorted(lengths, reverse=True))):
        started.clear()
        folder = tmp_path / f"out{len(options)}"
        small = ["--arms", "packed", "--batch-sizes", 2, "--repeats", 1]
        assert bench(*common(model, dataset, folder), *small, *options) == 0
        assert started[-6:] == order(started[-6:]), "the prompts of the file get longer line by line"
        assert json.loads((folder / "paper.json").read_text())["runs"][0]["exact"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "none,fast"], "--arms must be of none, packed, eqspec"),
        (["--batch-sizes", "1,x"], "--batch-sizes must be numbers of at least 1"),
        (["--batch-sizes", "0"], "--batch-sizes must be numbers of at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (
            ["--method", "ngram"],
            "give one drafter of --draft-model, --draft-noise, --method ngram; given are",
        ),
        (["--method", "draft_model"], "--method must be ngram, got 'draft_model'"),
        (["--group-by", "size"], "group_by must be one of length, acceptance"),
        (["--draft-noise", "-1"], "--draft-noise must be a number of at least 0"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--num-prompts", "99"], "--num-prompts must be at most 8"),
        (["--draft-noise", "nan"], "--draft-noise must be a number of at least 0"),
        (["--prompt-tokens", "-2"], "--prompt-tokens must be at least 1, got -2"),
        (["--window", "4"], "--window must be at least the largest batch size (32), got 4"),
    ],
)
def test_a_bad_option_is_one_line_and_writes_nothing(model, dataset, tmp_path, capsys, options, message):
    folder = tmp_path / "out"
    assert bench(*common(model, dataset, folder), *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not folder.exists()


def test_a_model_that_runs_padded_only_is_measured_and_a_measurement_overwritten(dataset, tmp_path):
    folder = tmp_path / "bloom"
    make_model_of("bloom", PADDED_FAMILIES["bloom"].overrides | {"vocab_size": 258}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    small = ["--arms", "eqspec,exspec", "--batch-sizes", 2, "--repeats", 1, "--max-model-len", 60]
    options = [*common(folder, dataset, tmp_path / "out"), *small]
    assert bench(*options) == bench(*options, "--overwrite") == 0
    runs = json.loads((tmp_path / "out" / "paper.json").read_text())["runs"]
    assert [(run["arm"], run["exact"]) for run in runs] == [("eqspec", 1.0), ("exspec", 1.0)]
