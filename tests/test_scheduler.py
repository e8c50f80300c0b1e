"""Who runs and who waits."""

from greedy import greedy
from scripted import make_engine, run_to_end


def test_without_refilling_a_batch_is_decoded_to_its_end_first():
    engine = make_engine(lambda context: 1, max_num_seqs=2, strategy="eqspec", refill=False)
    for name, budget in (("a", 2), ("b", 6), ("c", 3)):
        engine.add_request(name, [5], greedy(max_tokens=budget))
    run_to_end(engine)
    assert engine.stats.num_steps == 6 + 3
    assert engine.stats.occupancy == (2 + 6 + 3) / (2 * 9)
