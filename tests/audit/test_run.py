"""What a run keeps of an engine that does not keep its promise."""

from batchspec.audit.answers import Answer
from batchspec.audit.document import exit_code
from batchspec.audit.run import Run, run_engine
from batchspec.audit.sampling_run import collect
from batchspec.audit.session import Found


def judge(target, engine):
    run, steps = Run("some engine", 2), []
    run_engine(run, engine, target, lambda prompt, output: None, 0.0, lambda: steps.append(1))
    return run, len(steps)


def test_prompts_that_got_no_answer_are_errors(target):
    run, num_steps = judge(target, lambda jobs, size: iter([(3, Answer(target.references[3]))]))
    assert [outcome.prompt for outcome in run.outcomes] == list(range(len(target.prompts)))
    assert [outcome.kind for outcome in run.outcomes] == ["error"] * 3 + ["identical"] + ["error"] * 2
    assert "no answer" in run.outcomes[0].error
    assert num_steps == len(target.prompts)


def test_an_engine_that_gives_nothing_could_not_run(target):
    run, _ = judge(target, lambda jobs, size: iter([]))
    assert run.counts["error"] == len(target.prompts)
    assert exit_code(Found(runs=[run])) == 2


def test_samples_that_are_missing_count_as_errors(target):
    one = [(0, Answer([1])), (1, Answer([], error="out of memory"))]
    samples = collect(lambda jobs, size: iter(one), target, 2, 4, 1.0, 0, lambda: None)
    assert samples.num_errors == 4 * len(target.prompts) - 1


def test_what_ended_an_audit_early_comes_before_what_it_found(target):
    run, _ = judge(
        target, lambda jobs, size: iter((place, Answer(target.references[place])) for place in range(6))
    )
    assert exit_code(Found(runs=[run])) == 0
    assert exit_code(Found(runs=[run], is_stopped=True)) == 130
    assert exit_code(Found(runs=[run], crash="RuntimeError: out of memory")) == 2
