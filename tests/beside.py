"""Measures pauses of plain streams and memory of an endpoint's processes while a test sends a load.

A separate process reads the streams (`python beside.py URL MODEL STREAMS`). In the process that sends the load, the client's own
delays would count as the endpoint's.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from support import Served

from strata.platform import benchmark_record

SAMPLE_S = 1.0
IMPORTED_S = 20.0


@dataclass
class Measured:
    streams: int = 0
    broken: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0  # between two events of one stream
    longest_start_s: float = 0.0  # to a stream's first event
    memory: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # title, bytes at the start, peak bytes

    def grown_mib(self) -> dict[str, float]:
        return {f"{title} ({pid})": round((most - first) / 2**20) for pid, (title, first, most) in self.memory.items()}

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {mib:+.0f}" for name, mib in sorted(self.grown_mib().items(), key=lambda each: -each[1])[:6])
        return (
            f"{self.streams} plain streams beside them: longest pause {self.longest_pause_s:.2f} s, "
            f"longest time to the first token {self.longest_start_s:.2f} s; memory grown by at most (MiB): {grown}"
        )


def as_json(statuses: Counter[int], wrong_answers: int, measured: Measured, seed: int) -> dict[str, Any]:
    """JSON record of a load of hostile requests, for docs/results/data."""
    settings = f"STRATA_FUZZ_SEED={seed} STRATA_HOSTILE={statuses.total()}"
    return {
        **benchmark_record.header("hostile"),
        "command": f"{settings} pytest -s tests/serving/api/test_hostile_requests.py",
        "requests": statuses.total(),
        "by_status": {str(status): count for status, count in sorted(statuses.items())},
        "wrong_answers": wrong_answers,
        "streams": measured.streams,
        "broken_streams": len(measured.broken),
        "longest_pause_s": measured.longest_pause_s,
        "largest_growth_mib": max(measured.grown_mib().values()),
    }


@contextlib.contextmanager
def measuring(served: Served, streams: int = 2) -> Iterator[Measured]:
    measured, stop = Measured(), threading.Event()
    _sample(served, measured)
    sampler = threading.Thread(target=_sample_on, args=(served, measured, stop))
    sampler.start()
    command = [sys.executable, __file__, served.url, served.model, str(streams)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield measured
    finally:
        stop.set()
        answer, _ = reader.communicate(timeout=120)  # closing its input ends it
        for name, value in json.loads(answer).items():
            setattr(measured, name, value)
        sampler.join()
        _sample(served, measured)


def read_streams(url: str, model: str, streams: int) -> Measured:
    """Reads streams until standard input is closed."""
    measured, stop = Measured(), threading.Event()
    threads = [threading.Thread(target=_stream_on, args=(url, model, measured, stop)) for _ in range(streams)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    return measured


def _stream_on(url: str, model: str, measured: Measured, stop: threading.Event) -> None:
    body = {"model": model, "prompt": "def f(self):\n", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as client:
        while not stop.is_set():
            try:
                _one_stream(client, url, body, measured)
            except httpx.HTTPError as error:
                measured.broken.append(repr(error))
                time.sleep(0.5)


def _one_stream(client: httpx.Client, url: str, body: dict[str, object], measured: Measured) -> None:
    began = last = time.monotonic()
    events, last_line = 0, ""
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in filter(None, response.iter_lines()):
            last_line = line
            now = time.monotonic()
            if events:
                measured.longest_pause_s = max(measured.longest_pause_s, now - last)
            else:
                measured.longest_start_s = max(measured.longest_start_s, now - began)
            events, last = events + 1, now
        if response.status_code == 429:
            time.sleep(float(response.headers["retry-after"]))
        elif response.status_code != 200 or last_line != "data: [DONE]":
            measured.broken.append(f"{response.status_code} {last_line[:200]}")
        else:
            measured.streams += 1


def _sample_on(served: Served, measured: Measured, stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_S):
        _sample(served, measured)


def _sample(served: Served, measured: Measured) -> None:
    later = bool(measured.memory)
    for process in [served.process, *served.process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            title, now = (process.cmdline() or [process.name()])[0].rpartition("/")[2].split()[0], process.memory_info().rss
            if process.pid not in measured.memory:
                first = _size_at_start(process, title) if later else now
                if first is None:
                    continue
                measured.memory[process.pid] = title, first, now
            title, first, most = measured.memory[process.pid]
            measured.memory[process.pid] = title, first, max(most, now)


def _size_at_start(process: psutil.Process, title: str) -> int | None:
    """Initial memory of a process: its parent's for a forked grammar process, else its own after imports."""
    parent = psutil.Process(process.ppid())
    if (parent.cmdline() or [""])[0].endswith(title):
        return int(parent.memory_info().rss)
    return int(process.memory_info().rss) if time.time() - process.create_time() > IMPORTED_S else None


if __name__ == "__main__":
    found = read_streams(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({name: getattr(found, name) for name in ("streams", "broken", "longest_pause_s", "longest_start_s")}))
