"""What the README tells people to type works."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from batchspec.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(program):
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.split()[:1] == [program]]


@pytest.mark.parametrize("command", commands("make"))
def test_make_commands_exist(command):
    """Dry: the demo is run below, and this is `make test`."""
    done = subprocess.run(shlex.split(f"{command} -n"), cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"make demo": "batchspec demo", "make test": "pytest"}[command] in done.stdout


@pytest.mark.real_model
def test_python_blocks_run_one_after_the_other(smollm, capsys):
    """With the model from the disk instead of the hub."""
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smollm), names)
    printed = capsys.readouterr().out
    assert "of the draft tokens were accepted" in printed
    assert '{"age": ' in printed


@pytest.mark.real_model
def test_commands_run_one_after_the_other(smollm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "The capital of France is", "id": 7}, {"turns": ["Say yes.", "Say no."]}]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = ["generate", "generate", "generate", "bench", "audit"]
    assert [command.split()[1] for command in commands("batchspec")] == wanted
    for command in commands("batchspec"):
        if command.split()[1] in ("bench", "audit"):  # a small one
            command += " --max-tokens 4 --batch-sizes 2"
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert not ended.value.code
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert sorted(answer["index"] for answer in answers) == [0, 1]
    assert next(answer for answer in answers if answer["index"] == 0)["id"] == 7


@pytest.mark.real_model
def test_demo_ends_with_all_identical(smollm, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--max-tokens", "24"])
    assert not ended.value.code
    assert capsys.readouterr().out.strip().splitlines()[-1] == "8/8 identical"


def test_links_lead_to_files():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:tests|docs|src)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
