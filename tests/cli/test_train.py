"""`batchspec train-drafter` from the command line."""

from __future__ import annotations

import json

import pytest
from toy_folders import save_text_llama

from batchspec.cli.main import main

SMALL = ["--layers", "1", "--max-tokens", "24", "--shard-size", "24", "--tokens", "200", "--num-measurements", "2"]
SMALL += ["--minutes", "0.06", "--data-minutes", "0.05", "--max-num-seqs", "8", "--dtype", "float32"]


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train-drafter", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_drafter_is_trained_and_the_same_command_finds_it_done(tmp_path, capsys):
    target, out = save_text_llama(tmp_path / "target"), tmp_path / "out"
    assert run("--target", target, "--out", out, *SMALL) == 0
    assert json.loads((out / "config.json").read_text())["format"] == "batchspec-draft"
    work = out / "training"
    assert {path.name for path in work.iterdir()} == {
        "recipe.json",
        "data",
        "state.pt",
        "curve.jsonl",
        "curve.png",
    }
    curve = (work / "curve.jsonl").read_text()
    assert run("--target", target, "--out", out, *SMALL) == 0
    assert (work / "curve.jsonl").read_text() == curve
    (work / "curve.png").unlink()  # as if it had been killed before it was drawn
    assert run("--target", target, "--out", out, *SMALL) == 0
    assert (work / "curve.png").exists()
    assert run("--target", target, "--out", out, *SMALL, "--seed", "1") == 2
    assert "holds a training with another seed" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The sea"}\n')
    answers = tmp_path / "answers.jsonl"
    options = ["--model", target, "--draft-model", out, "--input", prompts, "--output", answers, "--max-tokens", 8]
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, options)])
    assert not ended.value.code
    assert json.loads(answers.read_text())["output"]["metrics"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "x"], "kind must be one of layers, feature, got 'x'"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--minutes", "0"], "minutes must be a number above 0"),
        (["--minutes", "1", "--data-minutes", "1"], "data_minutes must be above 0 and below minutes"),
        (["--layers", "3"], "--layers must be at most 2, as many as the target has, got 3"),
        (["--prompts", "nowhere.jsonl"], "--prompts 'nowhere.jsonl' cannot be read"),
        (["--seed", str(2**32)], "seed must be below 2**32"),
    ],
)
def test_bad_options_end_with_one_line(tmp_path, capsys, options, message):
    target = save_text_llama(tmp_path / "target")
    assert run("--target", target, "--out", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "out").exists()
