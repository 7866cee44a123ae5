"""Restarts the GCS of a local Ray cluster when it dies.

The GCS (Ray's head process: actors, placement, key-value store) stores its tables in memory by default, and raylets and
workers exit 60 s after its death. A local cluster stores them in RocksDB, which is part of Ray, in a folder per cluster. A GCS
restarted on the same folder and port recovers its state within a second. On Kubernetes the component `gcs-ft` does the same
with Redis.
"""

import fcntl
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOOK_S = 0.25
# A GCS that dies more often than this has a cause that restarts do not fix, such as a full disk.
RESTARTS = 5
WITHIN_S = 60.0
PREFIX = "gcs-"


@contextmanager
def store(parent: Path) -> Iterator[dict[str, str]]:
    """Ray's settings for a GCS with a store on disk. The store is removed when the block ends.

    A killed command leaves its folder behind. Each start removes the folders that no process has locked."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f"{PREFIX}*"):
        _remove_unless_locked(leftover)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with (folder / "new").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "new").rename(folder / "held")  # other starts look for this name, and find it locked
        try:
            yield {"gcs_storage": "rocksdb", "gcs_storage_path": str(folder)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unless_locked(folder: Path) -> None:
    try:
        with (folder / "held").open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # locked, not yet renamed, or removed by a concurrent start
        return


@contextmanager
def restarted_on_failure() -> Iterator[None]:
    """Restarts the GCS of the local cluster that `ray.init` started in this process, until the block ends."""
    from ray._private import worker

    supervisor = _Supervisor(worker._global_node)
    supervisor.start()
    try:
        yield
    finally:
        supervisor.release()


class _Supervisor(threading.Thread):
    """Thread that restarts the GCS. It never ends before the process does.

    Linux sends a child its parent-death signal when the thread that started it ends. A restarted GCS must outlive the
    supervision, until Ray has shut down."""

    def __init__(self, node: Any) -> None:
        super().__init__(daemon=True, name="gcs-supervisor")
        self._node = node
        self._released = threading.Event()
        self._restarting = threading.Lock()
        self._restarts: deque[float] = deque(maxlen=RESTARTS)

    def release(self) -> None:
        """Stops restarting, before the cluster is shut down. Waits for a restart in progress."""
        self._released.set()
        with self._restarting:
            pass

    def run(self) -> None:
        while not self._released.wait(LOOK_S):
            with self._restarting:
                if not self._released.is_set() and (code := self._exit_code()) is not None and not self._restart(code):
                    break
        threading.Event().wait()

    def _exit_code(self) -> int | None:
        from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER

        infos = self._node.all_processes.get(PROCESS_TYPE_GCS_SERVER, ())
        return next((code for info in infos if (code := info.process.poll()) is not None), None)

    def _restart(self, code: int) -> bool:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        now = time.monotonic()
        if len(self._restarts) == RESTARTS and now - self._restarts[0] < WITHIN_S:
            _report(f"Ray's GCS ended {how}, {RESTARTS + 1} times within a minute; it is not restarted.")
            return False
        self._restarts.append(now)
        try:
            self._node.kill_gcs_server(check_alive=False)  # removes the dead process from Ray's list
            self._node.start_gcs_server()
        except Exception as error:  # Ray raises many types, and this thread must not end
            _report(f"Ray's GCS ended {how} and could not be restarted: {error}")
            return False
        _report(f"Ray's GCS ended {how}; it was restarted from its store.")
        return True


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
