"""Record of a graph's fusions: those made, and those refused with the reason."""

from collections import Counter
from dataclasses import dataclass, field


class NoMatch(Exception):
    """Reason why a candidate is left as it is."""


@dataclass(frozen=True)
class Fusion:
    """One replacement. Bytes and launches are those of the forward pass, against one kernel per node (see savings.py)."""

    pattern: str
    where: str
    nodes: tuple[str, ...]
    bytes_saved: int | None
    launches_saved: int


@dataclass(frozen=True)
class Refusal:
    pattern: str
    where: str
    reason: str


@dataclass
class Record:
    """Fusions of one or more graphs, filled by the backend: `torch.compile(..., options={"record": record})`."""

    fused: list[Fusion] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    graphs: int = 0

    def counts(self) -> dict[str, int]:
        return dict(Counter(fusion.pattern for fusion in self.fused))
