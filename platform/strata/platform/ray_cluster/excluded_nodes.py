"""Nodes that a run avoids: `runs/<name>/excluded/<node id>.json`, one file per node. Deleting a file readmits its node."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from strata.platform.errors import UserError
from strata.platform.files import write_atomic

CORRUPTED, GRADIENTS, HUNG, SLOW = "corrupted replica", "wrong gradients", "repeated hangs", "slow rank"


@dataclass(frozen=True)
class Node:
    """Address of a Ray node. The id is new after each start of its raylet; host and address are those of its machine or pod."""

    id: str
    host: str
    address: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, Ray node {self.id[:8]})"


@dataclass(frozen=True)
class Excluded:
    node: Node
    kind: str
    cause: str
    at: float  # seconds since the epoch

    @property
    def strict(self) -> bool:
        """True if the run ends rather than uses the node: its results would be wrong, not late."""
        return self.kind == CORRUPTED

    def sentence(self, run: Path) -> str:
        readmission = f"To readmit it, delete {path(run, self.node.id)}"
        return f"Node {self.node} is excluded from this run: {self.kind}. {self.cause} {readmission}"


_EXCLUDED = TypeAdapter(Excluded)


def path(run: Path, node: str) -> Path:
    return run / "excluded" / f"{node}.json"


def add(run: Path, excluded: Excluded) -> None:
    """Written whole, so that several processes may exclude the same node at the same moment."""
    write_atomic(path(run, excluded.node.id), json.dumps(asdict(excluded), indent=1) + "\n")


def read(run: Path) -> list[Excluded]:
    """Excluded nodes of a run, oldest first."""
    found = []
    for file in (run / "excluded").glob("[!.]*.json"):
        try:
            found.append(_EXCLUDED.validate_json(file.read_bytes()))
        except FileNotFoundError:  # readmitted at this moment
            continue
        except ValidationError as error:
            raise UserError(f"{file} is damaged: {error.errors()[0]['msg']}.", "Delete it to readmit its node.") from None
    return sorted(found, key=lambda one: one.at)


def matched(excluded: Sequence[Excluded], nodes: Mapping[str, Node]) -> dict[str, Excluded]:
    """The living nodes that are excluded, by id. A machine whose raylet was started again has a new id: it is found by host and
    address, unless the raylet with the old id is alive beside it."""
    found = {}
    for one in excluded:
        again = [node.id for node in nodes.values() if (node.host, node.address) == (one.node.host, one.node.address)]
        for node in [one.node.id] if one.node.id in nodes else again:
            if node not in found or one.strict:
                found[node] = one
    return found
