"""Folder of a profile: for each engine a trace, the log of its scheduler and facts; and the requests as the clients saw them.

vLLM names its traces by process and time. `collect` gives them short names, and adds the requests to them.
"""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.profile import trace
from strata.serving.bench.clients.load import Record
from strata.serving.engine.profiled import LOG, STOP
from strata.serving.profile.analysis import phases, scheduler_log
from strata.serving.profile.analysis.scheduler_log import SchedulerLog
from strata.serving.profile.analysis.summary import Engine
from strata.serving.profile.request_lanes import lanes

CLIENTS = "requests.json"
TRACE = ".trace.json.gz"
BASE = "baseTimeNanoseconds"  # of a trace: the Unix time of its zero


def clear(target: Path) -> None:
    """Removes the files of an older profile."""
    for pattern in (f"*{TRACE}", f"*.{LOG}", "prefill-*.json", "decode-*.json", CLIENTS):
        for old in target.glob(pattern):
            old.unlink()


def collect(source: Path, target: Path, records: Sequence[Record], clock_s: float) -> None:
    """Moves the files of all engines. `clock_s`: Unix time of the zero of the clients' clock."""
    target.mkdir(parents=True, exist_ok=True)
    clear(target)
    count: Counter[str] = Counter()
    for folder in sorted(each for each in source.iterdir() if each.is_dir()):
        facts = json.loads((folder / STOP).read_text())
        name = f"{facts['role']}-{count[facts['role']]}"
        count[facts["role"]] += 1
        traces = sorted(folder.glob(f"*{TRACE}"))
        if not traces:
            raise UserError(f"Engine {name} wrote no trace.", "Check the space on the disk, and see the logs of the endpoint.")
        shutil.copyfile(folder / LOG, target / f"{name}.{LOG}")
        for rank, path in enumerate(traces):
            _copy(path, target / f"{name}{f'-rank{rank}' if rank else ''}{TRACE}", folder / LOG)
        write_atomic(target / f"{name}.json", json.dumps(facts | {"name": name}))
    clients = [{"begin": each.start + clock_s, "end": each.end + clock_s, "error": each.error} for each in records]
    write_atomic(target / CLIENTS, json.dumps(clients))


def _copy(source: Path, target: Path, log: Path) -> None:
    document = _read(source)
    document["traceEvents"] += lanes(_log(log, document))
    with gzip.open(target, "wt", compresslevel=1) as file:
        json.dump(document, file)


def read(folder: Path) -> list[Engine]:
    """Engines of a collected profile."""
    clients = json.loads((folder / CLIENTS).read_text())
    if not clients:
        raise UserError("No request was measured.", "Send more with --requests.")
    engines = []
    for path in sorted(folder.glob(f"*.{LOG}")):
        name = path.name.removesuffix(f".{LOG}")
        facts = json.loads((folder / f"{name}.json").read_text())
        document = _read(folder / f"{name}{TRACE}")
        base = document[BASE] / 1e9
        seen = tuple((each["begin"] - base, each["end"] - base) for each in clients)
        window = min(begin for begin, _ in seen), max(end for _, end in seen)
        parsed = trace.parse(document, facts | {"rank": 0, "device": _device(document)}, phases.is_step)
        engines.append(Engine(name, parsed.facts, parsed, _log(path, document), window, seen))
    return engines


def _read(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        document: dict[str, Any] = json.load(file)
    return document


def _log(path: Path, document: dict[str, Any]) -> SchedulerLog:
    with path.open() as lines:
        return scheduler_log.read(lines, document[BASE])


def _device(document: dict[str, Any]) -> str:
    return next((str(each["name"]) for each in document.get("deviceProperties", ())), "cpu")
