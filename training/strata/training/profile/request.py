"""Request for a profile: a file in a run's folder that every worker reads. Ray Train cannot send messages to workers."""

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from strata.platform.errors import UserError, shown
from strata.platform.files import write_atomic
from strata.training.profile import nsight
from strata.training.profile.nsight import Tool

FOLDER = "profile"  # in a run
FILE = "request.json"
LOOK_EVERY_S = 1.0  # a worker looks for a request
SPAN = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True)
class Request:
    """Steps to profile, both ends included and counted as in a run's records. `ranks` empty: all."""

    id: str
    first: int
    last: int
    ranks: tuple[int, ...] = ()
    tool: Tool = "torch"

    def folder(self, run: Path) -> Path:
        """Folder of the profile's files, one trace for each rank."""
        return run / FOLDER / self.id

    def includes(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks


def write(run: Path, request: Request) -> None:
    request.folder(run).mkdir(parents=True, exist_ok=True)
    write_atomic(run / FOLDER / FILE, json.dumps(asdict(request)))


def read(run: Path) -> Request | None:
    """The newest request of a run. None without one, or for a file that another version wrote."""
    try:
        fields = json.loads((run / FOLDER / FILE).read_text())
        return Request(fields["id"], fields["first"], fields["last"], tuple(fields["ranks"]), nsight.parse(fields["tool"]))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None


def new_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())


def parse_steps(text: str) -> tuple[int, int]:
    """`10..14`, or `10` for one step. The step before the first one warms the profiler up."""
    match = SPAN.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 2 <= first <= last:
        raise UserError(f"--steps {shown(text)} is no range of steps from 2 on.", "Write it as 10..14.")
    return first, last


def parse_ranks(text: str, workers: int) -> tuple[int, ...]:
    """`0,1`, or `all`, for which the result is empty."""
    if text == "all":
        return ()
    ranks = [int(word) if word.isdecimal() else -1 for word in text.split(",")]
    if any(not 0 <= rank < workers for rank in ranks):
        raise UserError(f"--ranks {shown(text)} has a rank that {workers} workers do not have.", "Write it as 0,1 or all.")
    return tuple(sorted(set(ranks)))
