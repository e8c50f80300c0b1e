"""Are the answers equal that have to be? A speedup of other text is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchspec.bench.methods import NONE, Method
from batchspec.bench.run import Run


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers that others are held against: those of `none` if it was run, else of the first of our methods
    that has to be exact."""

    method: str
    is_none: bool
    answers: list[str]

    def differing(self, run: Run) -> list[int]:
        """Prompts whose answers have other tokens."""
        pairs = zip(run.answers, self.answers, strict=True)
        return [place for place, (own, reference) in enumerate(pairs) if own != reference]

    def exact_match(self, run: Run) -> float:
        return 1 - len(self.differing(run)) / len(self.answers)


def find_reference(runs: Iterable[Run], methods: Iterable[Method]) -> Reference | None:
    """The first run of the method to compare with, whatever its batch size: tokens do not depend on that.

    None if no run has to be exact.
    """
    candidates = [method for method in methods if method.has_to_be_exact]
    runs = list(runs)
    for method in sorted(candidates, key=lambda method: method.kind != NONE):
        for run in runs:
            if run.method == method.name:
                return Reference(method.name, method.kind == NONE, run.answers)
    return None


def prompts_that_differ(
    runs: Iterable[Run], methods: Iterable[Method], reference: Reference | None
) -> dict[tuple[str, int], list[int]]:
    """By method and batch size: prompts whose answers had to be the reference's and are not, in any repeat."""
    bound = {method.name for method in methods if method.has_to_be_exact}
    found: dict[tuple[str, int], set[int]] = {}
    for run in runs:
        if reference is not None and run.method in bound and (places := reference.differing(run)):
            found.setdefault((run.method, run.batch_size), set()).update(places)
    return {key: sorted(places) for key, places in found.items()}
