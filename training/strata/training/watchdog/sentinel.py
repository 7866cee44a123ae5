"""Process beside a worker that reports the worker's state without its help, and kills it when the driver requests that.

A worker that is stopped, that has died or whose GIL is taken cannot report. Its sentinel reads the last status that the worker
wrote and the kernel's view of the process, and writes both to the run's folder. Standard library only: it runs without
site-packages. Standard input is a pipe from the worker; its end of file means that the worker has ended.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

LOOK_S = 1.0
REPORT_S = 2.0  # between reports: the run's folder may be a network file system
LAST_S = 5.0  # after the end of the pipe, until the process is gone
MOST_STACKS = 2**14
ESTABLISHED = "01"
TICKS = os.sysconf("SC_CLK_TCK")


def _stat(path: str) -> list[str]:
    """Fields of a stat file after the name, which may have spaces: state first."""
    return Path(path).read_text().rpartition(")")[2].split()


def created(pid: int) -> int:
    """Start time of a process in clock ticks, which distinguishes it from a later one with the same PID."""
    return int(_stat(f"/proc/{pid}/stat")[19])


def kill(pid: int, then: int) -> bool:
    """Kills a process if it is still the one created at that time."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if created(pid) != then:  # the handle is of the process that is checked here
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


class Process:
    """The worker as the kernel shows it."""

    def __init__(self, pid: int, then: int, thread: int) -> None:
        self._pid, self._then, self._thread = pid, then, thread
        self._before: tuple[float, float, float, int] | None = None

    def look(self) -> dict[str, Any]:
        try:
            stat, thread = _stat(f"/proc/{self._pid}/stat"), _stat(f"/proc/{self._pid}/task/{self._thread}/stat")
            if int(stat[19]) != self._then or stat[0] in "ZX":
                raise ProcessLookupError
        except OSError:
            return {"gone": True, "at": time.time()}
        now = (time.monotonic(), _cpu_s(stat), _cpu_s(thread), self._io())
        then, self._before = self._before or now, now
        elapsed = (now[0] - then[0]) or 1.0
        return {
            "gone": False,
            "at": time.time(),
            "state": stat[0],
            "thread_state": thread[0],
            "cpu": (now[1] - then[1]) / elapsed,
            "thread_cpu": (now[2] - then[2]) / elapsed,
            "io": (now[3] - then[3]) / elapsed,
            "syscall": self._syscall(),
        }

    def sockets(self) -> list[list[Any]]:
        """TCP connections: local and remote address, unacknowledged bytes, unread bytes, retransmissions."""
        try:
            links = [str(entry.readlink()) for entry in Path(f"/proc/{self._pid}/fd").iterdir()]
            lines = [line for kind in ("tcp", "tcp6") for line in Path(f"/proc/{self._pid}/net/{kind}").read_text().splitlines()]
        except OSError:
            return []
        mine = {link[8:-1] for link in links if link.startswith("socket:")}
        found: list[list[Any]] = []
        for line in lines:
            words = line.split()
            if len(words) > 9 and words[3] == ESTABLISHED and words[9] in mine:
                unacknowledged, unread = (int(word, 16) for word in words[4].split(":"))
                found.append([words[1], words[2], unacknowledged, unread, int(words[6], 16)])
        return found

    def _io(self) -> int:
        try:
            lines = Path(f"/proc/{self._pid}/io").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))

    def _syscall(self) -> int | None:
        """Number of the training thread's system call; None if it runs, or if the kernel does not tell."""
        try:
            word = Path(f"/proc/{self._pid}/task/{self._thread}/syscall").read_text().split()[0]
        except (OSError, IndexError):
            return None
        return int(word) if word.isdigit() else None


def _cpu_s(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / TICKS


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # the folder is gone with its run, or full
        partial.write_text(text)
        partial.replace(path)


def main(order: dict[str, Any]) -> None:
    process = Process(order["pid"], order["created"], order["thread"])
    status, report, kill_order = Path(order["status"]), Path(order["report"]), Path(order["kill"])
    due, open_, deadline = 0.0, True, float("inf")
    while True:
        if open_ and select.select([sys.stdin], [], [], LOOK_S)[0]:  # its only event is the end of file
            open_, deadline = False, time.monotonic() + LAST_S
        elif not open_:
            time.sleep(0.1)
        if kill_order.exists():
            kill(order["pid"], order["created"])
        seen = process.look()
        try:
            text = json.loads(status.read_text())
        except (OSError, ValueError):
            text = {}
        last = seen["gone"] or (not open_ and (bool(text.get("ended")) or time.monotonic() > deadline))
        if last or time.monotonic() >= due:
            due = time.monotonic() + REPORT_S
            stacks = Path(order["stacks"])
            with contextlib.suppress(OSError):
                seen["stacks"] = stacks.read_bytes()[-MOST_STACKS:].decode(errors="replace") if stacks.stat().st_size else ""
            silent = bool(text.get("groups")) or time.time() - text.get("beat", 0) > REPORT_S
            seen["sockets"] = process.sockets() if silent and not seen["gone"] else []
            _write(report, json.dumps({"status": text, "process": seen}))
        if last:
            if "Fatal Python error" in seen.get("stacks", ""):
                sys.stderr.write(seen["stacks"])
            shutil.rmtree(order["scratch"], ignore_errors=True)
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
