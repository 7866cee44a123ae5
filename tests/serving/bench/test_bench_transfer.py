"""`strata bench transfer`: real NIXL between two processes, in host memory."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.serving import commands
from strata.serving.bench import transfer

pytest.importorskip("nixl")


@pytest.mark.slow
def test_transfers_are_timed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "transfer.json"
    words = ["--device", "cpu", "--mib", "1", "--fragments", "1,7", "--repeat", "2", "--json", str(file)]
    done = CliRunner().invoke(build(), ["bench", "transfer", *words])
    assert done.exit_code == 0, done.output or done.exception
    result = json.loads(file.read_text())
    (readings,) = result["readings"].values()  # the engines' UCX settings concern GPU memory only
    assert set(readings) == {"1", "7"}
    for reading in readings.values():
        assert 0 < reading["post_s"] <= reading["total_s"] <= reading["first_s"]
    assert "GB/s" in done.stdout


@pytest.mark.slow
def test_failed_transfer_raises_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_transport")
    with pytest.raises(UserError, match="NIXL could not read 1 fragments: "):
        transfer.bench("cpu", 1 << 20, [1], 1, tmp_path / "transfer.json", Console(quiet=True))


@pytest.mark.parametrize(
    ("device", "fragments", "cause"), [("tpu", "1", "no device 'tpu'"), ("cpu", "0,x", "no list of numbers")]
)
def test_bad_options_are_refused(device: str, fragments: str, cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        commands.bench_transfer(device, 1, fragments, 1, None)
