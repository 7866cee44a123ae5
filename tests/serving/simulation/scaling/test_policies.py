"""Scaling by SLO beside Ray Serve's default policy: replica-hours and violations, over load shapes and seeds.

A day of these tests has two hours, so that a run takes a second. docs/serving.md has whole days.
"""

import json
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.cli import CommandGroup
from strata.platform.errors import UserError
from strata.serving.simulation import generated
from strata.serving.simulation.command import simulate

# An engine that sustains about 2 requests per second of 1,000 prompt and 300 output tokens within this SLO.
ENGINE = {
    "fixed_s": 0.04, "sequence_s": 5e-4, "context_token_s": 1e-7, "prompt_token_s": 2e-4, "prompt_pair_s": 0,
    "request_s": 0.01, "kv_tokens": 400_000, "context": 32_768,
}  # fmt: skip
SLO = ("--slo-ttft", "4", "--slo-itl", "0.15")
LOAD = ("--prompt", "1000", "--output", "300", "--rate", "1", "--startup", "60", "--hours", "2")


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(ENGINE))
    return str(path)


def run(*words: str) -> Any:
    app = typer.Typer()
    app.callback(cls=CommandGroup, invoke_without_command=True)(simulate)
    app.command("other")(lambda: None)
    answer = CliRunner().invoke(app, [*words, "--json", "-"])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


def compared(calibration: str, *words: str) -> tuple[tuple[float, int], tuple[float, int]]:
    """(replica-hours, violations) by SLO and by Ray's default."""
    found = run("--calibration", calibration, *LOAD, *SLO, "--scale", "slo", "--scale", "ray-default", *words)["policies"]
    pair = [(found[name]["pools"]["decode"]["replica_hours"], found[name]["slo"]["violations"]) for name in found]
    return pair[0], pair[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrivals",
    ["poisson", "diurnal", "bursts", "steps", *(pytest.param(one, marks=pytest.mark.rotation) for one in ("ramp", "night"))],
)
def test_fewer_replica_hours_at_no_more_violations(arrivals: str, calibration: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "DAY_S", 7200.0)
    monkeypatch.setattr(generated, "NIGHT_S", 2400.0)
    monkeypatch.setattr(generated, "STEP_S", 1800.0)
    monkeypatch.setattr(generated, "RAMP_S", 1800.0)
    least = "0" if arrivals == "night" else "1"
    ours, rays = compared(calibration, "--arrivals", arrivals, "--decode", least, "--max-decode", "40")
    assert ours[0] <= 0.75 * rays[0] and ours[1] <= rays[1], (ours, rays)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.rotation)])
def test_a_tenfold_step_of_a_trace(seed: int, calibration: str, tmp_path: Path) -> None:
    chance, at, lines = random.Random(seed), 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    while at < 3600:
        at += chance.expovariate(3.0 if 1200 <= at < 2400 else 0.3)
        when = datetime(2026, 11, 1) + timedelta(seconds=at)
        lines.append(f"{when.isoformat(sep=' ')},{1 + int(chance.expovariate(1e-3))},{1 + int(chance.expovariate(1 / 300))}")
    trace = tmp_path / "step.csv"
    trace.write_text("\n".join(lines))
    policies = ("--scale", "slo", "--scale", "ray-default", "--max-decode", "40")
    found = run("--calibration", calibration, *SLO, *policies, "--startup", "60", "--trace", str(trace))["policies"]
    ours, rays = found["slo"], found["ray-default"]
    assert ours["pools"]["decode"]["replica_hours"] <= 0.75 * rays["pools"]["decode"]["replica_hours"]
    assert ours["slo"]["violations"] <= rays["slo"]["violations"]


def test_fixed_runs_the_most_replicas(calibration: str) -> None:
    words = ("--calibration", calibration, "--requests", "200", "--rate", "3", "--prompt", "200", "--output", "60", *SLO)
    found = run(*words, "--scale", "fixed", "--max-decode", "3")
    assert found["pools"]["decode"]["replicas"] == 3
    assert found["pools"]["decode"]["replica_hours"] == pytest.approx(3 * found["simulated_s"] / 3600, rel=0.02)
    both = run(*words, "--scale", "fixed", "--scale", "slo", "--scale", "fixed", "--max-decode", "3")
    assert list(both["policies"]) == ["fixed", "slo"] and both["policies"]["fixed"] == found


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--scale", "slo", "--max-decode", "3"), "needs an SLO"),
        (("--scale", "best", *SLO), "best is no policy"),
        (("--slo-ttft", "1"), "--slo-ttft and --slo-itl"),
        (("--scale", "slo", *SLO, "--decode", "4", "--max-decode", "3"), "--max-decode is 3, and --decode is 4"),
        (("--scale", "slo", *SLO, "--decode", "0"), "--max-decode is 0"),
        (("--decode", "0"), "leaves no engine"),
        (("--max-decode", "3"), "need --scale"),
        (("--scale", "slo", *SLO, "--max-decode", "3", "--kill", "decode:0@3"), "excludes --kill"),
        (("--hours", "1", "--requests", "10"), "--hours excludes"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], reason: str, calibration: str) -> None:
    with pytest.raises(UserError, match=reason):
        run("--calibration", calibration, *words)
