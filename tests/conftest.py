"""What tests share: a home of their own each, and, once for all of them, a trained model and an endpoint that serves it."""

import interpreting  # noqa: F401, I001  (first: it decides how all that is imported after it runs)
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support import ROOT, STRATA, TINY, Served, start_serving
from watching import Watch, watching

from strata.monitoring.prometheus.server import binary
from strata.platform.errors import UserError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or leaves, a run, a cache or a cluster of the user's."""
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


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
    """A home in which the command line trained a run named `tiny` on a few of the standard library's files."""
    if any("prometheus" in test.fixturenames for test in request.session.items if isinstance(test, pytest.Function)):
        with suppress(pytest.skip.Exception):  # without it only the tests that ask it are skipped
            request.getfixturevalue("prometheus")  # one that is to be asked about the run must see it
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
        if source.is_file():  # asyncore left in 3.12
            (corpus / f"{name}.txt").write_bytes(source.read_bytes())
    done = subprocess.run(
        [STRATA, "train", "--run", "tiny", f"data.path={corpus}", *TINY],
        # Ray hands on what workers measured every ten seconds, and the steps of this run take four. (After twice the interval it
        # forgets a gauge, and some are set every five seconds.)
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
    """`strata serve` as a user runs it, with one prefill engine, and two that decode, so that one may die."""
    served, process = start_serving(trained, trained / "runs" / "tiny" / "export", "serve.decode.replicas=2")
    try:
        served.wait_until_it_answers()
        yield served
        family = served.process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "a process outlived the command"
    assert code == 0 and served.output.read_text().endswith("Stopped.\n")
