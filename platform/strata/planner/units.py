"""Parsing and formatting of quantities: `15T` tokens, 79.2 GiB, 450 GB/s, 3.2 ms."""

from strata.planner.ranges import BYTES, TOKENS, Range
from strata.platform.errors import UserError, shown

BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
DECIMAL = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
LONG = ((172800.0, "days", 86400.0), (7200.0, "h", 3600.0), (120.0, "min", 60.0))  # from so many seconds on
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def show(value: float, unit: str, digits: int = 3) -> str:
    """Bytes in powers of two, as torch and drivers print memory; rates in powers of ten, as in datasheets."""
    match unit:
        case "":
            return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.{digits}g}"
        case "$":
            return dollars(value)
        case "B":
            return _scaled(value, BINARY, "B", digits)
        case "s":
            longer = next((((name, size),) for least, name, size in LONG if abs(value) >= least), SECONDS)
            return _scaled(value, longer, "s", digits)
        case _:
            return _scaled(value, tuple((prefix + unit, size) for prefix, size in DECIMAL), unit, digits)


def share(value: float) -> str:
    return f"{value:.1%}"


def dollars(value: float) -> str:
    if abs(value) >= 1e6:
        return f"${value / 1e6:,.2f}M"
    return f"${value:,.0f}" if abs(value) >= 1000 else f"${value:,.2f}"


def short(value: float) -> str:
    """A large count in a few letters, as people write sizes of models and datasets: 70.6B."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def count(text: str, option: str, within: Range = TOKENS) -> float:
    """15T, 300B, 16M, 8K, 1e12 or 4096."""
    words = text.strip().replace(",", "").replace("_", "")
    factor = COUNTS.get(words[-1:].upper(), 1.0)
    try:
        value = float(words[:-1] if factor != 1 else words) * factor
    except ValueError:
        raise UserError(f"{option} '{shown(text)}' is not a count.", f"Write it as in {option} 15T, 300B, 16M or 1e12.") from None
    within.check(option, value, text)
    return value


def size(text: str, option: str) -> float:
    """Bytes, or bytes a second: 20GB/s, 1.5TB, 64KiB or 2e9."""
    words = text.strip().removesuffix("/s").removesuffix("B").strip()
    letter = words.removesuffix("i")[-1:].upper()
    factor: float = (1024.0 if words.endswith("i") else 1000.0) ** POWERS.get(letter, 0)
    try:
        value = float(words.removesuffix("i")[:-1] if letter in POWERS else words) * factor
    except ValueError:
        raise UserError(f"{option} '{shown(text)}' is not a size.", f"Write it as in {option} 20GB, 64KiB or 2e9.") from None
    BYTES.check(option, value, text)
    return value


def _scaled(value: float, steps: tuple[tuple[str, float], ...], otherwise: str, digits: int) -> str:
    name, size = next(((name, size) for name, size in steps if abs(value) >= size), (otherwise, 1.0))
    scaled = value / size
    return f"{scaled:,.0f} {name}" if abs(scaled) >= 10**digits else f"{scaled:.{digits}g} {name}"
