"""Step times of a running engine, fitted while it serves: least squares over its steps, recent ones first.

A step takes a fixed time, plus a time per stream (which has that of its mean context) and per prompt token. The scaling policy
reads these three numbers in the place of the planner's model, which has none of CPU engines and no knowledge of the host.
"""

import math
from dataclasses import dataclass

import numpy as np

LEAST_STEPS = 50
HALF_LIFE = 2000  # steps
# Weight of the assumption that streams and prompt tokens take no time, in steps. It decides while all steps are alike.
PRIOR_STEPS = 1.0


@dataclass(frozen=True)
class LinearSteps:
    fixed_s: float
    stream_s: float
    prompt_token_s: float

    def step(self, sequences: float, _context: float, tokens: float, _pairs: float, _prompts: float = 0.0, /) -> float:
        return self.fixed_s + self.stream_s * sequences + self.prompt_token_s * tokens


class StepFit:
    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._times = np.zeros(3)
        self._weight = 0.0
        self._decay = math.exp2(-1 / HALF_LIFE)
        self.steps = 0

    def add(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        # Over the step's time, so that relative errors are minimized: steps with prompts are a hundred times as long as others.
        row = np.array((1.0, streams, prompt_tokens)) / seconds
        self._products = self._products * self._decay + np.outer(row, row)
        self._times = self._times * self._decay + row
        self._weight = self._weight * self._decay + 1
        self.steps += 1

    def times(self) -> LinearSteps | None:
        """None before `LEAST_STEPS` steps. No term is negative: more work does not make a step shorter."""
        if self.steps < LEAST_STEPS:
            return None
        scale = np.sqrt(np.maximum(np.diag(self._products), 1e-12 * self._products[0, 0]))
        used = [0, 1, 2]
        while True:
            products = (self._products / np.outer(scale, scale))[np.ix_(used, used)]
            products[np.diag_indices_from(products)] += [0.0 if term == 0 else PRIOR_STEPS / self._weight for term in used]
            found = np.linalg.solve(products, (self._times / scale)[used]) / scale[used]
            below = [term for term, value in zip(used, found, strict=True) if value < 0]
            if not below:
                break
            used = [term for term in used if term not in below] or [0]
        terms = [0.0, 0.0, 0.0]
        for term, value in zip(used, found, strict=True):
            terms[term] = float(value)
        return LinearSteps(max(terms[0], 1e-6), terms[1], terms[2])


class RecentShare:
    """Share of hits among recent queries: totals that halve every `TOKENS` queries."""

    TOKENS = 200_000

    def __init__(self) -> None:
        self._queries = self._hits = 0.0

    def add(self, queries: int, hits: int) -> None:
        fade = math.exp2(-queries / self.TOKENS)
        self._queries, self._hits = self._queries * fade + queries, self._hits * fade + hits

    @property
    def share(self) -> float:
        return self._hits / self._queries if self._queries else 0.0
