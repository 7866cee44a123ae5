"""Findings of a profile: causes that cost time, each with the seconds that mending it would save."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST = 3  # findings that a report names first


@dataclass(frozen=True)
class Found:
    """A finding before its share is known."""

    cause: str  # a key, such as "data"
    seconds: float  # saved
    text: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    cause: str
    seconds: float
    share: float  # of the step, or of the profiled time
    text: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.text} {self.remedy}"


def worth(found: Iterable[Found], whole: float, least: float) -> list[Finding]:
    """Findings that save at least a share of the whole, the largest first."""
    chosen = sorted((each for each in found if each.seconds >= least * whole), key=lambda each: -each.seconds)
    return [Finding(each.cause, each.seconds, each.seconds / whole, each.text, each.remedy) for each in chosen]


def named(found: Sequence[Finding], none: str) -> Iterator[str]:
    """Lines for a reader: the findings that matter most, or `none`."""
    if not found:
        yield none
    for number, finding in enumerate(found[:MOST], 1):
        yield f"{number}. {finding.sentence}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.9995 else f"{seconds:,.2f} s"
