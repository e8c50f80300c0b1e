"""The checks of the equality tests kill every mutant, and the package as it is passes them.

One mutant, the dropped last logit, leaves the tokens right and is seen by the number of rounds only.
"""

from __future__ import annotations

from math import ceil

import pytest
from greedy import greedy
from mutants import END, MUTANTS
from toy_models import MAX_LENGTH, VOCAB_SIZE, make_model

from batchspec import LLM
from batchspec.models.noise import noisy_copy
from batchspec.models.reference import generate_alone

FAMILIES = ("llama", "mistral", "gpt2", "bloom")
K = 4
BUDGETS = (12, 9, 13, 5, 10)
PROMPTS = [
    [(7 * serial + 5 * place) % VOCAB_SIZE for place in range(length)]
    for serial, length in enumerate((3, 14, 1, 8, 21))
]
PROMPTS[1][4] = PROMPTS[3][2] = PROMPTS[4][9] = END  # as between the turns of a conversation


def survives(family: str, break_package=lambda: None) -> bool:
    """The checks of `models/test_families.py` in short, with EQSPEC and an end token that is the padding token."""
    model = make_model(family)
    model.generation_config.eos_token_id = [END]
    model.generation_config.pad_token_id = END
    pairs = zip(PROMPTS, BUDGETS, strict=True)
    references = [generate_alone(model, prompt, budget, [END]) for prompt, budget in pairs]
    llms = [make_llm(model, draft) for draft in (noisy_copy(model), model)]
    break_package()  # after the trial steps at load, which would refuse to run at all with some of the mutants
    params = [greedy(max_tokens=budget) for budget in BUDGETS]
    by_noise, by_itself = [llm.generate(PROMPTS, params, use_tqdm=False) for llm in llms]
    return (
        [output.outputs[0].token_ids for output in by_noise] == references
        and [output.outputs[0].token_ids for output in by_itself] == references
        and [output.metrics.num_rounds for output in by_itself] == [ceil(len(ref) / (K + 1)) for ref in references]
    )


def make_llm(model, draft):
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": K}
    return LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=3,
        max_model_len=MAX_LENGTH,
        strategy="eqspec",
        speculative_config=config,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_package_as_it_is_passes(family):
    assert survives(family)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_killed(name, monkeypatch):
    killers = []
    for family in FAMILIES:
        with monkeypatch.context() as patch:
            if not survives(family, lambda: MUTANTS[name](patch)):
                killers.append(family)
    assert killers, f"no family tells the package from: {MUTANTS[name].__doc__}"
    print(f"{name}: killed by {', '.join(killers)}")
