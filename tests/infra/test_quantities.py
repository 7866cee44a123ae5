"""Arithmetic of Kubernetes quantities."""

from fractions import Fraction

import pytest

from strata.deploy.quantities import add, exact, largest, number, text, times


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("4", 4),
        (2, 2),
        ("500m", Fraction(1, 2)),
        ("0.5", Fraction(1, 2)),
        ("1k", 1000),
        ("2M", 2_000_000),
        ("3G", 3 * 10**9),
        ("1T", 10**12),
        ("1Ki", 1024),
        ("512Mi", 2**29),
        ("16Gi", 2**34),
        ("2Ti", 2**41),
        ("1Pi", 2**50),
        ("1.5Gi", 3 * 2**29),
    ],
)
def test_quantities(quantity: str | int, expected: Fraction) -> None:
    assert number(quantity) == expected


@pytest.mark.parametrize(
    ("resource", "amount", "expected"),
    [
        ("cpu", Fraction(21, 5), "5"),
        ("cpu", Fraction(4), "4"),
        ("memory", Fraction(2**30), "1Gi"),
        ("memory", Fraction(2**30 + 1), "2Gi"),
        ("ephemeral-storage", Fraction(2**31), "2Gi"),
        ("nvidia.com/gpu", Fraction(8), "8"),
        ("memory", Fraction(0), "0Gi"),
    ],
)
def test_amounts_are_rounded_up(resource: str, amount: Fraction, expected: str) -> None:
    assert text(resource, amount) == expected


@pytest.mark.parametrize(
    ("resource", "amount", "expected"),
    [
        ("cpu", Fraction(21, 5), "4200m"),
        ("cpu", Fraction(4), "4"),
        ("memory", Fraction(2**30), "1Gi"),
        ("memory", Fraction(2**30 + 1), "1025Mi"),
        ("memory", Fraction(3 * 2**29), "1536Mi"),
    ],
)
def test_exact_amounts(resource: str, amount: Fraction, expected: str) -> None:
    assert exact(resource, amount) == expected


def test_amounts_by_resource() -> None:
    one, two = {"cpu": Fraction(1), "memory": Fraction(2)}, {"cpu": Fraction(3), "gpu": Fraction(1)}
    assert add(one, two) == {"cpu": 4, "memory": 2, "gpu": 1}
    assert times(3, two) == {"cpu": 9, "gpu": 3}
    assert largest(one, two) == {"cpu": 3, "memory": 2, "gpu": 1}
    assert add() == largest() == {}
