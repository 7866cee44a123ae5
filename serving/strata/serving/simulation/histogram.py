"""Weighted histogram with logarithmic bins, for values too many to store: every token of every stream."""

import math

PER_E = 200  # bins per factor of e: values within a bin differ by 0.5%


class Histogram:
    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self.weight = 0
        self.total = 0.0

    def add(self, value: float, weight: int = 1) -> None:
        bin_ = math.floor(math.log(value) * PER_E)
        self._weights[bin_] = self._weights.get(bin_, 0) + weight
        self.weight += weight
        self.total += value * weight

    def add_run(self, first: float, growth: float, steps: int, weight: int) -> None:
        """Adds `steps` values that begin with `first` and grow by `growth`, each with `weight`. Values that differ by less than a
        bin are added as one."""
        done = 0
        while done < steps:
            value = first + done * growth
            count = steps - done if growth <= 0 else min(steps - done, max(1, int(value / PER_E / growth)))
            self.add(value + (count - 1) / 2 * growth, count * weight)
            done += count

    def percentile(self, share: float) -> float | None:
        """Smallest bin's middle with at least `share` of the weight at or below it."""
        passed = 0.0
        for bin_ in sorted(self._weights):
            passed += self._weights[bin_]
            if passed >= share * self.weight:
                return math.exp((bin_ + 0.5) / PER_E)
        return None
