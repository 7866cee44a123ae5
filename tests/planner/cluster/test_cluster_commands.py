"""`strata plan cluster` and `plan queue` on the command line: tables, JSON, plots and errors."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from strata.planner.cli.cluster import plan_cluster
from strata.planner.cli.queue import plan_queue
from strata.platform.errors import UserError

app = typer.Typer()
app.command("cluster")(plan_cluster)
app.command("queue")(plan_queue)

QUEUE = ("queue", "--gpus", "64", "--jobs", "120")


def strata(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "140"})


def answered(*words: str) -> dict[str, Any]:
    result = strata(*words, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*words: str) -> UserError:
    error = strata(*words).exception
    assert isinstance(error, UserError), error
    return error


def test_a_fleet_is_printed_with_its_limits() -> None:
    text = strata("cluster", "--gpus", "100000").stdout
    for words in ("Ray clusters", "at most 2,000 nodes", "Prometheus shards", "8,237,620 series", "failures per day", "goodput"):
        assert words in text


def test_a_fleet_explains_every_figure() -> None:
    found = answered("cluster", "--gpus", "100000", "--explain")
    titles = [part["title"] for part in found["explain"]["parts"]]
    assert titles == ["control planes", "monitoring", "checkpoint storage", "failures", "failures of the fleet"]
    assert "ceil(series / series_per_shard)" in strata("cluster", "--gpus", "100000", "--explain").stdout


def test_a_fleet_of_a_recipe() -> None:
    found = answered("cluster", "--gpus", "1000", "--recipe", "8xh100")
    assert (found["run_gpus"], found["runs"]) == (8, 125)
    more = answered("cluster", "--gpus", "1000", "--recipe", "8xh100", "train.keep=7")
    assert more["storage_bytes"] == pytest.approx(found["storage_bytes"] * 8 / 4)
    assert answered("cluster", "--gpus", "1000", "--model", "llama-3-8b")["run_gpus"] == 1000


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--gpus", "0"), "out of range"),
        (("--gpus", "8", "--recipe", "8xh100", "--model", "llama-3-8b"), "--recipe and --model"),
        (("--gpus", "8", "--model", "llama-3-8b", "--state", "1TB"), "--model and --state"),
        (("--gpus", "8", "train.keep=7"), "--recipe is missing"),
        (("--gpus", "8", "--recipe", "laptop"), "trains on cpu"),
        (("--gpus", "16", "--recipe", "8xh100", "--run-gpus", "8"), "--run-gpus"),
        (("--gpus", "4", "--recipe", "8xh100"), "exceeds --gpus 4"),
        (("--gpus", "8", "--fleet", "none"), "no fleet"),
        (("--gpus", "100000", "--storage", "1kB/s"), "makes no progress"),
        (("--gpus", "8", "--state", "big"), "--state"),
    ],
)
def test_a_wrong_fleet_is_refused(words: tuple[str, ...], cause: str) -> None:
    error = refused("cluster", *words)
    assert cause in error.cause and error.fix


def test_a_queue_is_printed_by_policy_and_team(tmp_path: Path) -> None:
    result = strata(*QUEUE, "--teams", "a=40,b=24:8", "--plot", str(tmp_path))
    assert result.exit_code == 0, result.output
    for words in ("120 jobs (generated, seed 0, load 0.9) on 64 GPUs", "use of the cluster", "by team", "by priority"):
        assert words in result.stdout
    assert (tmp_path / "queue.png").read_bytes().startswith(b"\x89PNG")


def test_a_queue_as_json() -> None:
    found = answered(*QUEUE, "--policy", "fair", "--teams", "a=40,b=24:8", "--demand", "a=1,b=3")
    assert list(found["policies"]) == ["fair"]
    assert found["teams"] == [{"name": "a", "quota": 40, "borrow": None}, {"name": "b", "quota": 24, "borrow": 8}]
    figures = found["policies"]["fair"]
    assert figures["teams"]["a"]["jobs"] + figures["teams"]["b"]["jobs"] == 120
    assert figures["teams"]["b"]["jobs"] > 2 * figures["teams"]["a"]["jobs"]
    assert figures["at_head_s"] <= figures["bound_s"]


def test_a_seed_determines_a_queue() -> None:
    first, again, other = (answered(*QUEUE, "--policy", "fair", "--seed", seed)["policies"] for seed in ("3", "3", "4"))
    assert first == again != other


def trace(folder: Path, *rows: tuple[str, int, int, int]) -> str:
    """A file in the format of Helios: virtual cluster, GPUs, minute of submission, seconds."""
    lines = ["job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"]
    for number, (vc, gpus, minute, seconds) in enumerate(rows):
        lines.append(f"{number},u,{vc},{gpus},1,1,COMPLETED,2020-06-09 18:{minute:02d}:00,,,{seconds},0")
    (folder / "cluster_log.csv").write_text("\n".join(lines))
    return str(folder / "cluster_log.csv")


def test_a_queue_of_a_trace(tmp_path: Path) -> None:
    path = trace(tmp_path, ("x", 8, 0, 600), ("y", 8, 1, 60), ("z", 1000, 2, 60))
    found = answered("queue", "--gpus", "8", "--trace", path, "--policy", "fifo")
    fifo = found["policies"]["fifo"]
    assert (fifo["refused"], fifo["all"]["jobs"], fifo["teams"]["y"]["mean_s"]) == (1, 2, 540)
    assert [team["quota"] for team in found["teams"]] == [3, 3, 2]
    assert "left out: up to 1 jobs" in strata("queue", "--gpus", "8", "--trace", path, "--policy", "fifo").stdout


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--gpus", "130"), "not a multiple"),
        (("--teams", "a=60,b=60"), "add up to 120"),
        (("--teams", "a"), "is not NAME=NUMBER"),
        (("--teams", "a=1,a=2"), "twice"),
        (("--teams", "a=0"), "is not a quota"),
        (("--teams", "a=1.5"), "is not a quota"),
        (("--teams", "a=8:x"), "is not a quota"),
        (("--teams", "a=8:"), "is not a quota"),
        (("--demand", "a=x"), "is not a number of jobs"),
        (("--demand", "a=-1"), "is not a number of jobs"),
        (("--demand", "a=nan"), "is not a number of jobs"),
        (("--demand", "c=1"), "unknown teams: c"),
        (("--demand", "a=0,b=0"), "no jobs"),
        (("--load", "0"), "--load 0.0 is out of range"),
        (("--jobs", "0"), "out of range"),
        (("--trace", "none.csv"), "cannot be read"),
    ],
)
def test_a_wrong_queue_is_refused(words: tuple[str, ...], cause: str) -> None:
    error = refused(*QUEUE, *words)
    assert cause in error.cause and error.fix


def test_a_trace_with_other_teams_or_a_demand_is_refused(tmp_path: Path) -> None:
    path = trace(tmp_path, ("x", 8, 0, 600), ("y", 8, 1, 60))
    assert "lacks teams of the trace: y" in refused("queue", "--gpus", "8", "--trace", path, "--teams", "x=8").cause
    assert "--demand" in refused("queue", "--gpus", "8", "--trace", path, "--demand", "x=1").cause
    assert "2 teams for 1 GPUs" in refused("queue", "--gpus", "1", "--trace", path).cause


@pytest.mark.slow
def test_recorded_figures_are_those_of_this_simulation(root: Path) -> None:
    recorded = json.loads((root / "docs" / "results" / "data" / "plan-queue.json").read_text())
    _, _, *words = shlex.split(recorded["command"])  # strata plan
    found = answered(*words[: words.index("--json")])["policies"]
    assert found == recorded["policies"], recorded["command"]
