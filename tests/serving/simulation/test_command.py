"""`strata simulate` and `strata simulate validate`, as the command line calls them."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from support import ROOT
from typer.testing import CliRunner

from strata.platform.cli import CommandGroup
from strata.platform.errors import UserError
from strata.serving.calibration.command import simulate_validate
from strata.serving.simulation.command import simulate

CALIBRATION = {
    "fixed_s": 0.005, "sequence_s": 1e-5, "context_token_s": 2e-8, "prompt_token_s": 4e-5, "prompt_pair_s": 1e-10,
    "request_s": 0.01, "kv_tokens": 60_000, "context": 8192, "handoff_s": 0.001, "transfer_token_s": 1e-6,
}  # fmt: skip


def app() -> typer.Typer:
    """`simulate` with its subcommand, as the command line builds them from the entry points."""
    group = typer.Typer()
    group.callback(cls=CommandGroup, invoke_without_command=True)(simulate)
    group.command("validate")(simulate_validate)
    return group


def run(*words: str) -> str:
    answer = CliRunner().invoke(app(), words)
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def simulated(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", "-"))
    return found


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(CALIBRATION))
    return str(path)


def test_the_planner_gives_the_engines_their_times(tmp_path: Path) -> None:
    found = simulated("--model", "llama3-8b", "--gpu", "h100", "--requests", "60", "--rate", "4", "--variation", "0")
    assert found["requests"] == {"sent": 60, "completed": 60, "rejected": 0, "too_long": 0, "failed": 0}
    assert found["ttft_s"]["p50"] > 0.012 and 0.003 < found["itl_s"]["p50"] < 0.02
    faster = simulated("--model", "llama3-8b", "--gpu", "h200", "--requests", "60", "--rate", "4", "--variation", "0")
    assert faster["itl_s"]["p50"] < found["itl_s"]["p50"]


def test_the_table_has_every_figure(calibration: str) -> None:
    text = run("--calibration", calibration, "--decode", "2", "--prefill", "1", "--requests", "50", "--kill", "decode:1@2")
    for name in ("requests/s", "TTFT", "ITL", "queue", "prefix cache", "preemptions", "decode pool", "prefill pool", "prefills"):
        assert name in text


def test_equal_commands_print_equal_results(calibration: str) -> None:
    words = ("--calibration", calibration, "--requests", "80", "--turns", "2", "--shared", "64", "--arrivals", "bursts")
    assert simulated(*words, "--seed", "3") == simulated(*words, "--seed", "3") != simulated(*words, "--seed", "4")


def test_a_trace_is_replayed(calibration: str, tmp_path: Path) -> None:
    lines = [{"timestamp": 100 * n, "input_length": 1024, "output_length": 4, "hash_ids": [0, n]} for n in range(30)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = simulated("--calibration", calibration, "--trace", str(trace))
    assert found["requests"]["completed"] == 30
    assert found["prefix_hit_rate"] == pytest.approx(29 * 512 / (30 * 1024))
    assert simulated("--calibration", calibration, "--trace", str(trace), "--no-prefix-caching")["prefix_hit_rate"] == 0
    assert simulated("--calibration", calibration, "--trace", str(trace), "--requests", "7")["requests"]["sent"] == 7


def test_a_closed_loop_holds_its_concurrency(calibration: str) -> None:
    found = simulated("--calibration", calibration, "--concurrency", "4", "--requests", "200", "--variation", "0")
    # Little's law: requests in flight are their rate times their latency.
    assert found["requests_per_s"] * found["latency_s"]["mean"] == pytest.approx(4, rel=0.03)


def test_results_are_written(calibration: str, tmp_path: Path) -> None:
    run("--calibration", calibration, "--requests", "20", "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["requests"]["completed"] == 20


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ((), "One of --model and --calibration"),
        (("model=llama3-8b",), "model=llama3-8b is no option"),
        (("--model", "llama3-8b", "--calibration", "x.json"), "One of --model and --calibration"),
        (("--model", "llama3-8b", "--kill", "decode:1@5"), "--kill decode:1@5"),
        (("--model", "llama3-8b", "--kill", "prefill:0@5"), "--kill"),
        (("--model", "llama3-8b", "--kill", "gateway:0@5"), "--kill"),
        (("--model", "llama3-8b", "--kill", "decode:0"), "--kill"),
        (("--model", "llama3-8b", "--kill", "decode:0@nan"), "--kill"),
        (("--model", "llama3-70b", "--gpu", "h100"), "no memory for a KV cache"),
        (("--model", "llama3-8b", "--trace", "t.jsonl", "--concurrency", "2"), "--trace excludes"),
        (("--model", "llama3-8b", "--trace", "missing.jsonl"), "cannot be read"),
        (("--model", "llama3-8b", "--rate", "0"), "--rate"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        run(*words)


def test_recorded_runs_are_compared() -> None:
    """The planner's model covers one stream. At many, the errors are printed; this test bounds neither sign nor size there."""
    record = ROOT / "docs/results/data/serve-uniform-h200.json"
    rows = json.loads(run("validate", str(record), "--json", "-"))["rows"]
    assert {(row["contender"], row["concurrency"]) for row in rows} == {
        (contender, level) for contender in ("vllm", "strata") for level in (1, 16, 64, 256)
    }
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated"] / row["recorded"] - 1)
        if row["concurrency"] == 1 and row["metric"] != "ttft_p50":
            assert abs(row["error"]) < 0.1


@pytest.mark.parametrize(
    ("name", "cause"), [("serve-uniform-laptop", "CPUs"), ("serve-mixed-h200", "uniform workload"), ("train-h200", "no result")]
)
def test_other_records_are_refused(name: str, cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        run("validate", str(ROOT / f"docs/results/data/{name}.json"))


def test_routings_are_compared(calibration: str) -> None:
    words = ("--calibration", calibration, "--decode", "3", "--requests", "90", "--turns", "3", "--think", "1", "--shared", "800")
    found = simulated(*words, "--openings", "4", "--routing", "least-busy,kv,oracle,kv")["routings"]
    assert list(found) == ["least-busy", "kv", "oracle"]
    assert found["kv"]["prefix_hit_rate"] > found["least-busy"]["prefix_hit_rate"]
    assert found["kv"] == simulated(*words, "--openings", "4", "--routing", "kv"), "equal loads, whatever is beside it"
    assert found["kv"] == simulated(*words, "--openings", "4"), "the default is that of the recipe"
    text = run(*words, "--routing", "kv,least-busy")
    assert "prefix hits" in text and "least-busy" in text
    with pytest.raises(UserError, match="There is no routing random"):
        run(*words, "--routing", "kv,random")
