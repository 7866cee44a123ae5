"""Collectives of this process, from torch's flight recorder.

gloo records no times, and its finished operations stay in the state "scheduled": `retired` is what says that one is finished.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from torch._C import _distributed_c10d

# torch has no public function for this, and its stubs lack the private one.
_dump = _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
MOST_ENTRIES = 64  # of a group: more than one step's pattern


@dataclass(frozen=True)
class Collective:
    seq: int  # position in the group's order of collectives
    op: str
    sizes: str  # of the inputs, such as [[1024], [4]]
    retired: bool
    state: str  # scheduled, started or completed; gloo has only the first

    @property
    def signature(self) -> tuple[str, str]:
        return self.op, self.sizes

    def __str__(self) -> str:
        return f"collective {self.seq} ({self.op} of {self.sizes})"


def operations() -> int:
    """Collectives that were enqueued and finished so far, over all groups. Takes some 20 microseconds."""
    status = json.loads(_dump(False, False)).get("pg_status", {})
    counts = (int(group[key]) for group in status.values() for key in ("last_enqueued_collective", "last_completed_collective"))
    return sum(counts)


def recorded(last_failed: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The newest collectives of each group, oldest first. Takes tens of milliseconds: for a rank that makes no progress.
    `last_failed`: the newest one raised an error, after which the recorder shows it as finished."""
    entries = json.loads(_dump(True, False)).get("entries", [])
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, entry in enumerate(entries):
        if entry["is_p2p"]:
            continue
        one = Collective(
            entry["collective_seq_id"],
            entry["profiling_name"].partition(":")[2],
            json.dumps(entry["input_sizes"]),
            entry["retired"] and not (last_failed and number == len(entries) - 1),
            entry["state"],
        )
        groups.setdefault(":".join(entry["process_group"]), []).append(asdict(one))
    return {name: ops[-MOST_ENTRIES:] for name, ops in groups.items()}
