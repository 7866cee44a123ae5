"""`strata bench memory` and `strata bench checkpoint`, as a user types them, in their smallest form."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.platform import recipe_file
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.training.bench import copies, launch, memory, stalls
from strata.training.bench.contest import Job
from strata.training.metrics.records import Record

from ..conftest import SMALL


def record(step: int, **more: object) -> Record:
    return Record(step=step, loss=1.0, lr=0.1, grad_norm=None, tokens_per_s=0.0, time=float(step), **more)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("measured_mib", "code"), [(1.0, 0), (1.2, 1)], ids=["within 10%", "beyond 10%"])
def test_bench_memory_compares_and_exits_by_the_error(
    measured_mib: float, code: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement is a stand-in: a baseline of 1 GiB and the planned memory times a factor."""
    planned = {name: 100 * 2**20 * number for number, name in enumerate(memory.LAYOUTS, start=1)}
    found = iter([peak for size in planned.values() for peak in (2**30, 2**30 + int(size * measured_mib))])
    sizes = iter(planned.values())
    monkeypatch.setattr(memory, "planned_peak", lambda recipe: next(sizes))
    monkeypatch.setattr(memory, "_peak", lambda recipe, model, tokens: next(found))
    monkeypatch.setattr(memory.shards, "prepare", lambda *_: home)
    done = CliRunner().invoke(build(), ["bench", "memory", "--json", str(home / "memory.json")])
    assert done.exit_code == code, done.output
    assert all(name in done.stdout for name in planned) and "written to" in done.stdout
    layouts = json.loads((home / "memory.json").read_text())["layouts"]
    assert [row["error"] for row in layouts] == [pytest.approx(1 / measured_mib - 1, abs=1e-6)] * 3


def test_bench_checkpoint_reports_medians_without_the_first_save(
    home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training run is a stand-in with known stalls."""
    jobs: list[Job] = []

    def run(job: Job, with_ray: bool, *_: object) -> list[Record]:
        assert with_ray
        jobs.append(job)
        stall = 0.5 if job.recipe.train.checkpoint_upload == "sync" else 0.01
        return [
            record(5, checkpoint_stall_s=9.0),
            record(6),
            record(10, checkpoint_stall_s=stall),
            record(15, checkpoint_stall_s=stall),
        ]

    monkeypatch.setattr(launch, "run", run)
    words = ["bench", "checkpoint", "--saves", "2", "--rounds", "1", *SMALL, f"data.path={corpus}"]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output or done.exception
    assert [job.recipe.train.checkpoint_upload for job in jobs] == ["sync", "async"]
    assert {(job.recipe.train.steps, job.recipe.train.checkpoint_every) for job in jobs} == {(20, stalls.STEPS_BETWEEN)}
    assert "500.0 ms" in done.stdout and "10.0 ms" in done.stdout and "0.020" in done.stdout
    written = json.loads((home / ".strata" / "bench" / "checkpoint.json").read_text())
    assert written["stall_seconds"] == {"sync": [0.5, 0.5], "async": [0.01, 0.01]} and written["ratio"] == pytest.approx(0.02)


def test_bench_checkpoint_reports_a_failed_run(home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[Record]:
        raise launch.Failed("no memory")

    monkeypatch.setattr(launch, "run", fail)
    done = CliRunner().invoke(build(), ["bench", "checkpoint", *SMALL, f"data.path={corpus}"])
    assert isinstance(done.exception, UserError) and "The measured training run failed: no memory" in str(done.exception)


@pytest.mark.rotation
def test_bench_memory_measures_real_processes(home: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path) -> None:
    """One layout and a model too small to measure, so neither the memory nor the error has a limit here."""
    monkeypatch.setattr(memory, "LAYOUTS", {"data 2, ZeRO 0": ("parallel.zero=0",)})
    monkeypatch.setattr(memory, "MODEL", memory.MODEL.model_copy(update={"layers": 1, "hidden": 384, "heads": 6, "kv_heads": 2}))
    monkeypatch.setattr(memory, "STEPS", 2)
    done = CliRunner().invoke(build(), ["bench", "memory"])
    assert done.exit_code in (0, 1), done.output or done.exception
    (row,) = json.loads((home / ".strata" / "bench" / "memory.json").read_text())["layouts"]
    assert row["baseline"] > 2**26 and row["planned"] > 0 and isinstance(row["measured"], int)


@pytest.mark.rotation
def test_bench_checkpoint_measures_real_runs(home: Path, corpus: Path) -> None:
    words = ["bench", "checkpoint", "--saves", "2", "--rounds", "1", *SMALL, f"data.path={corpus}", "parallel.workers=1"]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output or done.exception
    written = json.loads((home / ".strata" / "bench" / "checkpoint.json").read_text())
    assert {mode: len(seconds) for mode, seconds in written["stall_seconds"].items()} == {"sync": 2, "async": 2}
    assert all(second > 0 for seconds in written["stall_seconds"].values() for second in seconds)


def test_bench_memory_copies_compares_alternate_steps(home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training run is a stand-in: a step takes 1 s, or 1.5 s beside a copy. Copies begin after even steps."""
    jobs: list[Job] = []

    def run(job: Job, with_ray: bool, *_: object) -> list[Record]:
        jobs.append(job)
        times = [step + 0.5 * ((step - 1) // 2) for step in range(1, 13)]
        return [record(step, memory_copy_s=0.7) | {"time": at} for step, at in enumerate(times, start=1)]  # type: ignore[misc]

    monkeypatch.setattr(launch, "run", run)
    settings = [*SMALL, f"data.path={corpus}"]
    found = copies.bench(recipe_file.load("laptop", settings), 12, 2, 2, False, home / "copies.json")
    assert found.ratio == 1.5 and found.copies == [0.7] * 8
    assert [job.recipe.train.memory_copy_every for job in jobs] == [2, 2] and len({job.run for job in jobs}) == 2
    written = json.loads((home / "copies.json").read_text())
    assert written["ratio"] == 1.5 and written["median_seconds"] == {"with_copy": 1.5, "without": 1.0, "copy": 0.7}
    monkeypatch.setattr(launch, "run", lambda *_: [record(step) for step in range(1, 13)])
    with pytest.raises(UserError, match="made no copies"):
        copies.bench(recipe_file.load("laptop", settings), 12, 2, 1, True, home / "copies.json")
