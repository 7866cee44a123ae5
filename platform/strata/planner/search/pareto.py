"""What of many choices is worth a look: those to which no other is better in every way."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def front(choices: Iterable[T], prices: Callable[[T], tuple[float, float]]) -> list[T]:
    """By two prices, the lower the better. In the order of the first one."""
    found: list[T] = []
    lowest = float("inf")
    for choice in sorted(choices, key=prices):
        if prices(choice)[1] < lowest:
            found.append(choice)
            lowest = prices(choice)[1]
    return found
