"""Kubernetes quantities, such as 500m and 16Gi."""

import re
from fractions import Fraction
from typing import Any

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
SUFFIXES = {
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{letter: Fraction(1, 1000) ** power for power, letter in enumerate("mun", 1)},
}


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
