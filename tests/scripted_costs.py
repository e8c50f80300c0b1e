"""Step costs and survivals by formula, for tests of what is drafted."""

from batchspec.drafting.costs import StepCosts


def survivals_of(row):
    survivals, survival = [], 1.0
    for chance in row:
        survival *= chance
        survivals.append(survival)
    return survivals


def rate(survivals, cut, costs):
    gained = len(survivals) + sum(sum(row[:count]) for row, count in zip(survivals, cut, strict=True))
    return gained / costs.seconds(len(survivals) + sum(cut))


def costs_of(slope, step=0):
    """Seconds that rise evenly, with a step up at every eighth token."""
    return StepCosts([(size, 1.0 + slope * size + step * (size // 8)) for size in range(1, 40)])
