"""Shared fixtures: a home for each test and, once per session, a trained model and an endpoint that serves it."""

import interpreting  # noqa: F401, I001  (first: it sets how later imports define kernels)
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from selection import (  # noqa: F401  (hooks of pytest)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_xdist_make_scheduler,
)
from support import ROOT, STRATA, TINY, Served, start_serving
from watching import Watch, watching

from strata.monitoring.prometheus.server import binary
from strata.platform.errors import UserError


def pytest_sessionstart() -> None:
    """Restores Ctrl-C where the shell runs the tests in the background and ignores it for them and all of their processes."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seeds of tests that draw their own, whether they passed or failed."""
    reports = [each for reports in terminalreporter.stats.values() for each in reports if isinstance(each, pytest.TestReport)]
    seeds = {(each.nodeid, name, value) for each in reports for name, value in each.user_properties if name.endswith("_SEED")}
    for test, name, value in sorted(seeds):
        terminalreporter.write_line(f"{name}={value} repeats {test}")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Isolates each test from the user's runs, cache and cluster."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restores the handlers of Ctrl-C and of termination, which commands set for the rest of their process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    """Restores torch's precision of fp32 products. On CPUs with AMX, lower ones change logits by percents."""
    yield
    if isinstance(torch := sys.modules.get("torch"), ModuleType):  # not a test's stand-in
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels of this session, shared by its processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton"


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    try:
        binary("prometheus")
    except UserError as error:
        pytest.skip(str(error))
    with watching(tmp_path_factory.mktemp("prometheus")) as watch:
        yield watch


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home folder with a run named `tiny`, trained by `strata train` on a few files of the standard library."""
    if any("prometheus" in test.fixturenames for test in request.session.items if isinstance(test, pytest.Function)):
        with suppress(pytest.skip.Exception):  # without Prometheus only the tests that need it are skipped
            request.getfixturevalue("prometheus")  # started first, so that it scrapes the run
    home = tmp_path_factory.mktemp("trained")
    corpus = home / "corpus"
    corpus.mkdir()
    library = Path(os.__file__).parent
    for name in (
        "argparse",
        "ast",
        "asyncore",
        "bdb",
        "calendar",
        "cmd",
        "codecs",
        "copy",
        "csv",
        "dataclasses",
        "difflib",
        "enum",
    ):
        source = library / f"{name}.py"
        if source.is_file():  # Python 3.12 removed asyncore
            (corpus / f"{name}.txt").write_bytes(source.read_bytes())
    done = subprocess.run(
        [STRATA, "train", "--run", "tiny", f"data.path={corpus}", *TINY],
        # Ray reports workers' metrics every ten seconds, and the steps of this run take four in all. It drops a gauge after twice
        # the interval, and some are set every five seconds.
        env=os.environ | {"STRATA_HOME": str(home), "RAY_metrics_report_interval_ms": "3000"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (home / "train.out").write_text(done.stdout)
    return home


@pytest.fixture(scope="session")
def endpoint(trained: Path) -> Iterator[Served]:
    """`strata serve` with one prefill engine and two decode engines, so that tests may kill one of them."""
    served, process = start_serving(trained, trained / "runs" / "tiny" / "export", "serve.decode.replicas=2")
    try:
        served.wait_until_ready()
        yield served
        family = served.process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "a process outlived the command"
    assert code == 0 and served.output.read_text().endswith("Stopped.\n")
