"""Pareto front over two prices."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def front(choices: Iterable[T], prices: Callable[[T], tuple[float, float]]) -> list[T]:
    """Choices that no other beats in both prices, ordered by the first price. Lower is better."""
    found: list[T] = []
    lowest = float("inf")
    for choice in sorted(choices, key=prices):
        if prices(choice)[1] < lowest:
            found.append(choice)
            lowest = prices(choice)[1]
    return found
