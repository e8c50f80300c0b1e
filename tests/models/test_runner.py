import torch
from toy_models import make_model

from batchspec.layout.packed import pack
from batchspec.models.runner import PackedRunner


def last_logits(runner, row, token_ids):
    """Prefill a row and compute its last token, with `row` further rows of one token each before it."""
    runner.prefill(row, token_ids[:-1])
    step = pack([0] * row + [len(token_ids) - 1], [1] * (row + 1))
    return runner.forward(step, torch.tensor([3] * row + token_ids[-1:]), keep=step.last_index[-1:])[0]


def test_a_long_prompt_is_computed_in_chunks_like_in_one_piece(monkeypatch):
    model = make_model("llama")
    tokens = [token % 90 for token in range(2, 40)]
    whole = last_logits(PackedRunner(model, 1, 64), 0, tokens)
    monkeypatch.setattr("batchspec.models.runner.PREFILL_CHUNK", 7)
    assert torch.allclose(last_logits(PackedRunner(model, 1, 64), 0, tokens), whole, atol=1e-9)


@torch.inference_mode()
def test_a_released_row_leaves_nothing_to_the_next_request_not_even_nan():
    runner = PackedRunner(make_model("llama"), 2, 64)
    clean = last_logits(runner, 1, [4, 5, 6])
    runner.release_row(1, 1, 3)
    runner.prefill(1, list(range(2, 30)))
    blocks = runner.cache.table.rows[1]  # the last ones, which no other row's block replaces
    for store in (*runner.cache.keys.values(), *runner.cache.values.values()):
        store[blocks] = torch.nan  # a request whose keys and values overflowed
    runner.release_row(1, 1, 28)
    assert torch.equal(last_logits(runner, 1, [4, 5, 6]), clean)
    assert runner.cache.table.rows[1] == blocks


@torch.inference_mode()
def test_a_row_that_moves_in_meets_nothing_of_the_one_before():
    runner = PackedRunner(make_model("llama"), 2, 64)
    runner.prefill(0, list(range(2, 22)))
    for store in (*runner.cache.keys.values(), *runner.cache.values.values()):
        store[runner.cache.table.rows[0]] = torch.nan
    runner.prefill(1, [4, 5, 6])
    runner.release_row(0, 1, 3)  # its block takes the place of the poisoned one
    assert runner.forward(pack([3], [1]), torch.tensor([7]))[0].isfinite().all()


def test_the_last_row_moves_to_the_place_of_the_released_one():
    runner = PackedRunner(make_model("llama"), 2, 64)
    alone = last_logits(PackedRunner(make_model("llama"), 1, 64), 0, [4, 5, 6, 7])
    runner.prefill(0, [8, 9])
    runner.prefill(1, [4, 5, 6])
    runner.release_row(0, 1, 3)
    step = pack([3], [1])
    assert torch.allclose(runner.forward(step, torch.tensor([7]))[0], alone, atol=1e-9)
