"""Kubernetes quantities, such as 500m or 16Gi, as exact numbers."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
SUFFIXES = {
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Fraction(1, 1000) ** power for power, letter in enumerate("mun", 1)},
}
GIB = 2**30

Amounts = dict[str, Fraction]


def parse(value: Any) -> Fraction | None:
    """Exact value of a quantity; None if it has no valid syntax."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    number, suffix = match.groups()
    if suffix is None:
        return Fraction(number)
    if suffix in SUFFIXES:
        return Fraction(number) * SUFFIXES[suffix]
    return Fraction(number) * Fraction(10) ** int(suffix[1:])


def number(quantity: str | int | float) -> Fraction:
    """Exact value of a quantity of our own manifests."""
    found = parse(quantity)
    assert found is not None, quantity
    return found


def text(resource: str, amount: Fraction) -> str:
    """Amount as a quantity, rounded up: bytes to GiB, others to whole numbers."""
    if resource in ("memory", "ephemeral-storage"):
        return f"{math.ceil(amount / GIB)}Gi"
    return str(math.ceil(amount))


def exact(resource: str, amount: Fraction) -> str:
    """Amount as a quantity: bytes in MiB or GiB, others in whole numbers or thousandths, rounded up."""
    if resource in ("memory", "ephemeral-storage"):
        mebibytes = math.ceil(amount / 2**20)
        return f"{mebibytes}Mi" if mebibytes % 1024 else f"{mebibytes // 1024}Gi"
    thousandths = math.ceil(amount * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def add(*amounts: Mapping[str, Fraction]) -> Amounts:
    resources = {resource for each in amounts for resource in each}
    return {resource: sum((each.get(resource, Fraction(0)) for each in amounts), Fraction(0)) for resource in resources}


def times(count: int | Fraction, amounts: Mapping[str, Fraction]) -> Amounts:
    return {resource: count * amount for resource, amount in amounts.items()}


def largest(*amounts: Mapping[str, Fraction]) -> Amounts:
    """Maximum of each resource."""
    resources = {resource for each in amounts for resource in each}
    return {resource: max(each.get(resource, Fraction(0)) for each in amounts) for resource in resources}
