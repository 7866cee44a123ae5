"""Selection and distribution of the tests: fast and slow ones, a rotation of rare ones, and groups that share what they start.

- `slow` tests start a cluster, engines, several processes or a compiler. `make check` leaves them out.
- `rotation` tests cover rare layouts and long runs. `make test` runs a third of them, another third every hour;
  `--rotation all` runs all, `--rotation 2` a certain third.
- Tests of one file run in one process, and so do all tests that share the session's trained run and endpoint.
"""

import time
import zlib

import pytest

PARTS = 3
SHARED = {"endpoint", "trained", "prometheus"}  # session fixtures that start Ray, engines or Prometheus
# The files with the longest tests, longest first: two processes end together if the long tests come first.
FIRST = (
    "training/parallel/test_equivalence.py",
    "training/failures/test_failures.py",
    "training/test_training_run.py",
    "kernels/test_stages.py",
    "training/bench/test_bench.py",
    "planner/memory/test_memory_plan.py",
    "platform/ray_cluster/test_cluster.py",
    "serving/engine/test_moe_tokens.py",
    "kernels/test_flash_attention_hopper.py",
    "kernels/test_flash_attention.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotation", default=None, help=f"rotation tests to run: 'all', or a part from 1 to {PARTS}")


def chosen_part(config: pytest.Config) -> int | None:
    """Part of the rotation tests to run, None for all. Also all if the command names a single test."""
    option = config.getoption("--rotation") or config.stash.get(PART, None)
    if option == "all" or any("::" in word for word in config.args):
        return None
    return int(option)


PART = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    # The processes of pytest-xdist get the part from the process that started them: the hour may end in between.
    controller = getattr(config, "workerinput", None)
    config.stash[PART] = controller["rotation"] if controller else str(int(time.time() // 3600) % PARTS + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "object") -> None:
    node.workerinput["rotation"] = node.config.stash[PART]  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> str:
    part = chosen_part(config)
    return (
        "rotation tests: all" if part is None else f"rotation tests: part {part} of {PARTS} (--rotation {part}; --rotation all)"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, left_out = chosen_part(config), []
    for item in list(items):
        if isinstance(item, pytest.Function) and SHARED & set(item.fixturenames):
            item.add_marker("slow")
            item.add_marker(pytest.mark.xdist_group("endpoint"))
        else:
            item.add_marker(pytest.mark.xdist_group(_file(item)))
        if part and item.get_closest_marker("rotation") and zlib.crc32(item.nodeid.encode()) % PARTS + 1 != part:
            left_out.append(item)
            items.remove(item)
    config.hook.pytest_deselected(items=left_out)
    items.sort(key=_rank)


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0].removeprefix("tests/")


def _rank(item: pytest.Item) -> int:
    """Position of a test: those of the endpoint first, then the long files. The sort is stable."""
    group = next(item.iter_markers("xdist_group")).args[0]
    return 0 if group == "endpoint" else 1 + FIRST.index(group) if group in FIRST else 1 + len(FIRST)
