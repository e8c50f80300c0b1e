"""`batchspec generate` as users run it, on a toy model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from greedy import greedy
from toy_folders import save_text_llama

from batchspec import LLM
from batchspec.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_text_llama(tmp_path_factory.mktemp("model"), seed=1))


def run(*arguments):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments)])
    return ended.value.code or 0


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": f"{letter} is", "id": letter * 2} for letter in "abcdefg"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_answers_carry_the_fields_of_their_line_and_equal_the_library_s(tmp_path, model, prompts):
    out = tmp_path / "out.jsonl"
    assert run("-i", prompts, "-o", out, "--model", model, "--max-tokens", 12, "--max-num-seqs", 3) == 0
    rows = sorted(rows_of(out), key=lambda row: row["index"])
    wanted = LLM(model).generate([row["prompt"] for row in rows], greedy(max_tokens=12), use_tqdm=False)
    assert [row["index"] for row in rows] == list(range(7))
    assert [row["id"] for row in rows] == [letter * 2 for letter in "abcdefg"]
    assert [row["output"]["text"] for row in rows] == [output.outputs[0].text for output in wanted]
    assert rows[0]["output"]["num_output_tokens"] == len(rows[0]["output"]["token_ids"])


@pytest.mark.parametrize(
    "drafting",
    [
        ["--method", "ngram"],
        ["--method", "suffix", "--suffix-min-match", 1, "--suffix-store-tokens", 1000],
        ["--draft-model", None],
        ["--method", "ngram", "--strategy", "exspec"],
    ],
)
def test_drafting_changes_nothing_but_the_metrics(tmp_path, model, prompts, drafting):
    drafting = [model if option is None else option for option in drafting]
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    common = ["-i", prompts, "--model", model, "--max-tokens", 20]
    assert run(*common, "-o", plain) == run(*common, "-o", drafted, *drafting) == 0

    def by_index(path):
        rows = {row.pop("index"): row for row in rows_of(path)}
        metrics = [row["output"].pop("metrics") for row in rows.values()]
        return rows, sum(metric["num_draft_tokens"] for metric in metrics)

    (plain_rows, no_drafts), (drafted_rows, drafts) = by_index(plain), by_index(drafted)
    assert plain_rows == drafted_rows
    assert no_drafts == 0 < drafts


def test_drawn_answers_depend_on_line_and_seed_only(tmp_path, model, prompts):
    """Not on the drafter, the batch size, a restart, or who asks for the same line again."""
    common = ["-i", prompts, "--model", model, "--max-tokens", 16, "--temperature", 1.2, "--top-p", 0.9]
    plain, other, resumed, reseeded = (tmp_path / f"{name}.jsonl" for name in ("a", "b", "c", "d"))
    assert run(*common, "-o", plain) == 0
    assert run(*common, "-o", other, "--method", "ngram", "--max-num-seqs", 2) == 0
    resumed.write_text("".join(line + "\n" for line in plain.read_text().splitlines()[3:5]))
    assert run(*common, "-o", resumed, "--resume", "--draft-model", model, "--max-num-seqs", 3) == 0
    assert run(*common, "-o", reseeded, "--seed", 1) == 0
    texts = [
        [row["output"]["token_ids"] for row in sorted(rows_of(path), key=lambda row: row["index"])]
        for path in (plain, other, resumed, reseeded)
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert len({tuple(text) for text in texts[0]}) == 7


def test_a_sampling_method_is_checked_and_needs_a_drafter(tmp_path, model, prompts, capsys):
    for value, message in (("typical", "must be one of coupled, rejection"), ("rejection", "needs --method or")):
        arguments = ["-i", prompts, "-o", tmp_path / "x.jsonl", "--model", model, "--sampling-method", value]
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err


def test_several_answers_are_a_list_with_log_probabilities_if_asked_for(tmp_path, model, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "a b"}\n{"turns": ["x", "y"]}\n')
    sampling = ["-n", 3, "--temperature", 1, "--logprobs", 2]
    assert run("-i", path, "-o", out, "--model", model, "--max-tokens", 5, *sampling) == 1
    assert "line 2: turns need -n 1" in capsys.readouterr().err
    answers = rows_of(out)[0]["outputs"]
    assert len(answers) == 3
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 3
    for answer in answers:
        first = [entry[0] for entry in answer["logprobs"]]
        assert [one["token_id"] for one in first] == answer["token_ids"]
        assert answer["cumulative_logprob"] == pytest.approx(sum(one["logprob"] for one in first))
        assert all(2 <= len(entry) <= 3 for entry in answer["logprobs"])


def test_turns_are_answered_one_after_the_other(tmp_path, model):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    turns = ["hello", "and then?", "why?"]
    path.write_text(json.dumps({"turns": turns}) + "\n" + json.dumps({"turns": ["one"]}) + "\n")
    assert run("-i", path, "-o", out, "--model", model, "--max-tokens", 6) == 0
    rows = {row["index"]: row for row in rows_of(out)}
    llm, messages = LLM(model), []
    for turn, answer in zip(turns, rows[0]["outputs"], strict=True):
        messages.append({"role": "user", "content": turn})
        wanted = llm.chat(messages, greedy(max_tokens=6), use_tqdm=False)[0].outputs[0]
        assert answer["text"] == wanted.text
        messages.append({"role": "assistant", "content": wanted.text})
    assert len(rows[1]["outputs"]) == 1


def test_bad_lines_are_named_and_the_others_answered(tmp_path, model, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ['{"prompt": "a"}', "not json", '{"prompt": ""}', '{"prompt": [999]}', '{"prompt": "\\ud800"}']
    path.write_text("\n".join([*lines, '{"prompt": "b", "x": NaN}', ""]))
    assert run("-i", path, "-o", out, "--model", model, "--max-tokens", 3) == 1
    assert sorted(row["index"] for row in rows_of(out)) == [0, 5]
    errors = capsys.readouterr().err
    assert "line 2: not JSON" in errors
    assert "line 3: prompt must not be empty" in errors
    assert "line 4: prompt must hold token ids from 0 to 257" in errors
    assert "line 5: prompt must be valid Unicode text" in errors
    assert "4 of 6 lines could not be answered" in errors
    assert run("-i", path, "-o", out, "--model", model, "--max-tokens", 3, "--resume") == 1
    assert len(rows_of(out)) == 2


def test_resume_answers_what_is_missing_and_repairs_a_torn_line(tmp_path, model, prompts):
    out = tmp_path / "out.jsonl"
    common = ["-i", prompts, "-o", out, "--model", model, "--max-tokens", 8]
    assert run(*common) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert run(*common) == 2  # neither --resume nor --overwrite
    assert run(*common, "--resume") == 0
    assert out.read_bytes().startswith(b"".join(lines[:3]))
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert run(*common, "--resume") == 0  # nothing left to do
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_resume_refuses_the_answers_to_another_input(tmp_path, model, prompts, capsys):
    out = tmp_path / "out.jsonl"
    for index, row in ((2, {"prompt": "something else"}), (99, {"prompt": "a is"})):
        content = json.dumps({"index": index, **row, "output": {}}) + '\n{"index": 5, "pro'
        out.write_text(content)
        assert run("-i", prompts, "-o", out, "--model", model, "--resume") == 2
        assert f"answers another input: line {index + 1} differs" in capsys.readouterr().err
        assert out.read_text() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such"], "there is no folder '/no/such'"),
        (["--method", "magic"], "method must be one of draft_model, early_exit, ngram, suffix, got 'magic'"),
        (
            ["--method", "ngram", "--num-speculative-tokens", "0"],
            "num_speculative_tokens must be an integer of at",
        ),
        (["--method", "ngram", "--draft-model", "x"], "--draft-model goes with --method draft_model"),
        (["--method", "draft_model"], "model must be given for method draft_model: a hub id, a folder or"),
        (["--max-tokens", "0"], "max_tokens must be an integer of at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer of at least 1"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "tpu9"], "device must be auto, cpu, or a device"),
        (["--method", "early_exit"], "--method early_exit needs --exit-layers"),
        (["--exit-layers", "1"], "--exit-layers goes with --method early_exit"),
        (["--method", "early_exit", "--exit-layers", "2"], "num_layers must be at most 1, fewer layers than the"),
        (["--draft-model", "/no/such"], "there is no folder '/no/such'"),
    ],
)
def test_a_bad_option_is_one_line_and_writes_nothing(tmp_path, model, prompts, capsys, options, message):
    out = tmp_path / "out.jsonl"
    defaults = [] if "--model" in options else ["--model", model]
    assert run("-i", prompts, "-o", out, *defaults, *options) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.strip().splitlines()) == 1
    assert not out.exists()


def test_stdin_and_stdout_are_a_pipe(model):
    done = subprocess.run(
        [sys.executable, "-m", "batchspec.cli.main", "generate", "-i-", "-o-", "--model", model, "--max-tokens=4"],
        input=b'{"prompt": "a"}\n{"prompt": "b"}\n',
        capture_output=True,
        check=True,
    )
    assert sorted(json.loads(line)["index"] for line in done.stdout.splitlines()) == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_a_file_that_resume_completes(tmp_path, model, number):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab" * (1 + i % 9)}) + "\n" for i in range(24)))
    command = [sys.executable, "-m", "batchspec.cli.main", "generate", "-i", str(path), "-o", str(out)]
    command += ["--model", model, "--max-tokens", "60", "--ignore-eos", "--max-num-seqs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    if number != signal.SIGKILL:
        assert b"--resume goes on" in errors
        assert out.read_bytes().endswith(b"\n")
    num_done = out.read_bytes().count(b"\n")
    assert 3 <= num_done < 24
    assert run(*command[4:], "--resume") == 0
    assert sorted(row["index"] for row in rows_of(out)) == list(range(24))
