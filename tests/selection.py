"""Selection of the tests: fast and slow ones, and a rotation of rare ones.

- `slow` tests start a cluster, engines, several processes or a compiler. They run one after the other, and `make check` leaves
  them out. Tests that share the session's trained run, endpoint or Prometheus are slow, and so are `rotation` tests.
- `rotation` tests cover rare layouts and long runs. `make test` runs a third of them, another third every hour;
  `--rotation all` runs all, `--rotation 2` a certain third.
"""

import time
import zlib

import pytest

PARTS = 3
SHARED = {"endpoint", "trained", "prometheus"}  # session fixtures that start Ray, engines or Prometheus


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotation", default=None, help=f"rotation tests to run: 'all', or a part from 1 to {PARTS}")


def chosen_part(config: pytest.Config) -> int | None:
    """Part of the rotation tests to run, None for all. Also all if the command names a single test."""
    option = config.getoption("--rotation") or int(time.time() // 3600) % PARTS + 1
    return None if option == "all" or any("::" in word for word in config.args) else int(option)


def pytest_report_header(config: pytest.Config) -> str:
    part = chosen_part(config)
    return "rotation tests: all" if part is None else f"rotation tests: part {part} of {PARTS} (or --rotation all)"


@pytest.hookimpl(tryfirst=True)  # before the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = chosen_part(config)
    selected, left_out = [], []
    for item in items:
        rotates = item.get_closest_marker("rotation") is not None
        if rotates or (isinstance(item, pytest.Function) and SHARED & set(item.fixturenames)):
            item.add_marker("slow")
        in_part = part is None or not rotates or zlib.crc32(item.nodeid.encode()) % PARTS + 1 == part
        (selected if in_part else left_out).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=left_out)
