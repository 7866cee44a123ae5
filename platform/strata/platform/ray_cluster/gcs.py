"""Restarts the GCS of a local Ray cluster when it dies.

The GCS (Ray's head process: actors, placement, key-value store) keeps its tables in memory by default, and everything that
hangs from it ends 60 s after its death. A local cluster keeps them in RocksDB instead, which is part of Ray, in a folder of
its own; a GCS that is started again on the same folder and port takes up where the lost one stopped, within a second.
On Kubernetes the component `gcs-ft` does the same with Redis.
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
# A GCS that dies more often than this has a cause that a restart does not cure, such as a full disk.
RESTARTS = 5
WITHIN_S = 60.0
PREFIX = "gcs-"


@contextmanager
def store(parent: Path) -> Iterator[dict[str, str]]:
    """Ray's settings for a GCS with a store on disk, which is removed with this block.

    Ray's own processes are SIGKILLed with ours and leave the folder behind, so each start removes those that nobody holds."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        _remove_unless_held(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with (folder / "new").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "new").rename(folder / "held")  # from here on others see it, and that it is locked
        try:
            yield {"gcs_storage": "rocksdb", "gcs_storage_path": str(folder)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unless_held(folder: Path) -> None:
    try:
        with (folder / "held").open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # held, not yet marked as held, or removed by another start in this moment
        return


@contextmanager
def kept_alive() -> Iterator[None]:
    """Watches the GCS of the local cluster that `ray.init` started in this process."""
    from ray._private import worker

    keeper = _Keeper(worker._global_node)
    keeper.start()
    try:
        yield
    finally:
        keeper.release()


class _Keeper(threading.Thread):
    """Outlives the watch: Linux sends the death signal of a process when the thread that started it ends, not when the process
    does, and a restarted GCS must live until Ray has shut down."""

    def __init__(self, node: Any) -> None:
        super().__init__(daemon=True, name="gcs-keeper")
        self._node = node
        self._released = threading.Event()
        self._restarting = threading.Lock()
        self._restarts: deque[float] = deque(maxlen=RESTARTS)

    def release(self) -> None:
        """After this nothing is restarted any more: the cluster is about to be shut down."""
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
            _say(f"Ray's GCS ended {how}, {RESTARTS + 1} times within a minute; it is not started again.")
            return False
        self._restarts.append(now)
        try:
            self._node.kill_gcs_server(check_alive=False)  # forgets the dead one
            self._node.start_gcs_server()
        except Exception as error:  # Ray raises many kinds, and this thread must not end with any of them
            _say(f"Ray's GCS ended {how} and could not be started again: {error}")
            return False
        _say(f"Ray's GCS ended {how}; it was started again from its store.")
        return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
