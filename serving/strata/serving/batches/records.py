"""Records of stored files and batches, as they are on disk and in answers."""

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled", "expired"})
ID = re.compile(r"(file-|batch_)[0-9a-f]{32}(-output|-errors)?")
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Id that sorts by the time of its creation."""
    return f"{prefix}{time.time_ns():016x}{os.urandom(8).hex()}"


@dataclass(frozen=True)
class StoredFile:
    id: str
    filename: str
    size: int  # bytes
    created_at: int
    purpose: Literal["batch", "batch_output"]

    @staticmethod
    def load(data: bytes) -> "StoredFile":
        return StoredFile(**json.loads(data))

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def answer(self) -> dict[str, Any]:
        """File object of OpenAI's API."""
        tree = asdict(self)
        return {"object": "file", "bytes": tree.pop("size"), "status": "processed", "expires_at": None} | tree


@dataclass(frozen=True)
class Counts:
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Batch:
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    times: dict[str, int] = field(default_factory=dict)  # Unix times of changes of the status, by their names in TIMES
    errors: tuple[dict[str, Any], ...] = ()  # reasons why it failed, by line
    counts: Counts = Counts()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @staticmethod
    def load(data: bytes) -> "Batch":
        tree = json.loads(data)
        return Batch(**tree | {"counts": Counts(**tree["counts"]), "errors": tuple(tree["errors"])})

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def output_id(self) -> str:
        """Id of the output file. Derived from the batch's own, so that a gateway that takes the batch over continues the file."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_id(self) -> str:
        return f"file-{self.id.removeprefix('batch_')}-errors"

    def answer(self) -> dict[str, Any]:
        """Batch object of OpenAI's API."""
        tree = asdict(self)
        times, errors, counts = tree.pop("times"), tree.pop("errors"), tree.pop("counts")
        listed = {"object": "list", "data": list(errors)} if errors else None
        return (
            {"object": "batch"} | tree | {name: times.get(name) for name in TIMES} | {"errors": listed, "request_counts": counts}
        )
