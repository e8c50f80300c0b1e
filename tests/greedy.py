"""Parameters for greedy decoding, which is not the default."""

from functools import partial

from batchspec import SamplingParams

greedy = partial(SamplingParams, temperature=0.0)
