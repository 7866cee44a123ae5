"""Selection of the tests, fast and slow ones and a rotation of rare ones, and their distribution over two processes.

- `slow` tests start a cluster, engines, several processes or a compiler. `make check` leaves them out. Tests that share the
  session's trained run, endpoint or Prometheus are slow, and so are `rotation` tests.
- `rotation` tests cover rare layouts and long runs. `make test` runs a part of them, another one every hour, all in a day;
  `--rotation all` runs all, `--rotation 2` a certain part. Those that are also `long` are in no part: they take minutes on an
  idle machine.
- A process runs one file at a time. The files that share the session's fixtures count as one, so each fixture starts once.
"""

import os
import re
import time
from functools import cache
from typing import Any

import pytest
from support import ROOT
from xdist.scheduler.loadscope import LoadScopeScheduling

PARTS = 24
SHARED = {"endpoint", "trained", "prometheus"}  # session fixtures that start Ray, engines or Prometheus
USES_SHARED = re.compile(r"\b(endpoint: Served|trained: Path|prometheus: Watch)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotation", default=None, help=f"rotation tests to run: 'all', or a part from 1 to {PARTS}")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the part here, in the process that starts the others: they copy the options, and the hour may change."""
    if config.option.rotation is None:
        single = any("::" in word for word in config.args)
        config.option.rotation = "all" if single else str(int(time.time() // 3600) % PARTS + 1)


def chosen_part(config: pytest.Config) -> int | None:
    """Part of the rotation tests to run, None for all. Also all if the command names a single test."""
    option = config.getoption("--rotation")
    return None if option == "all" else int(option)


def pytest_report_header(config: pytest.Config) -> str:
    part = chosen_part(config)
    return "rotation tests: all" if part is None else f"rotation tests: part {part} of {PARTS} (or --rotation all)"


@pytest.hookimpl(tryfirst=True)  # before the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = chosen_part(config)
    selected, left_out = [], []
    rotating = 0
    for item in items:
        rotates = item.get_closest_marker("rotation") is not None
        rotating += rotates
        if rotates or (isinstance(item, pytest.Function) and SHARED & set(item.fixturenames)):
            item.add_marker("slow")
        due = not rotates or (rotating % PARTS + 1 == part and item.get_closest_marker("long") is None)
        (selected if part is None or due else left_out).append(item)
    items[:] = sorted(selected, key=lambda item: _turn(item.location[0])) if "PYTEST_XDIST_WORKER" in os.environ else selected
    config.hook.pytest_deselected(items=left_out)


def _turn(file: str) -> int:
    """Files that take long begin early, so that both processes end at about the same time."""
    return 0 if uses_shared(file) else 1 if file.startswith("tests/training/") else 2


@cache
def uses_shared(file: str) -> bool:
    return USES_SHARED.search((ROOT / file).read_text()) is not None


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Assigns the tests of a file to one process. xdist's own groups need test names that pytest 9.2 no longer lets it change."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "shared" if uses_shared(file) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)
