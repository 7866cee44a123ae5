"""Expected errors by regime, and the warning line of plans outside the validated regime."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.planner.catalogue.library import model
from strata.planner.cli import check_regimes, comparison
from strata.planner.layout import Layout
from strata.planner.validation import check_training
from strata.planner.validation.trust import ERRORS, REGIMES, VALIDATED, regimes_of
from strata.platform.cli import build

ROOT = Path(__file__).parents[2]
DENSE = ["plan", "--model", "llama-3.1-70b", "--data", "8", "--tensor", "8", "--pipeline", "4", "--batch", "512"]


def trust_of(*words: str) -> tuple[str, dict[str, Any]]:
    """Warning lines of a plan, and the `trust` object of its JSON."""
    text = CliRunner().invoke(build(), list(words), env={"COLUMNS": "100"})
    data = CliRunner().invoke(build(), [*words, "--json", "-"])
    assert text.exit_code == 0 and data.exit_code == 0, text.output
    lines = [line for line in text.stdout.splitlines() if "published" in line and "on average" in line]
    found: dict[str, Any] = json.loads(data.stdout)["trust"]
    return "\n".join(lines), found


def test_a_plan_in_the_validated_regime_prints_no_warning() -> None:
    line, trust = trust_of(*DENSE)
    assert line == "" and trust == {"validated": True, "line": "", "regimes": {}, "unchecked": []}


@pytest.mark.parametrize(
    ("words", "regimes"),
    [
        (["--zero", "3"], ["sharded", "memory"]),
        (["--program", "torch-fsdp"], ["sharded", "memory"]),
        (["--program", "strata"], ["other-program", "memory"]),
        (["--seq", "32768"], ["long"]),
        (["--seq", "131072", "--zero", "2"], ["long", "sharded", "memory"]),
    ],
)
def test_a_plan_outside_the_validated_regime_prints_its_expected_error(words: list[str], regimes: list[str]) -> None:
    line, trust = trust_of(*DENSE, *words)
    assert line.startswith(f"Outside the validated regime ({VALIDATED}).") and "\n" not in line
    assert line == trust["line"] and list(trust["regimes"]) == regimes and not trust["validated"]
    for name in regimes:
        assert f"{REGIMES[name]}: {trust['regimes'][name]['mean']:.0%} off on average".lower() in line.lower()


def test_the_errors_file_is_up_to_date() -> None:
    written, planned = json.loads(ERRORS.read_text()), json.loads(check_regimes.as_json())
    assert written.keys() == planned.keys(), "run python -m strata.planner.cli.check_regimes"
    for name, errors in written.items():
        assert errors == pytest.approx(planned[name], abs=2e-4), "run python -m strata.planner.cli.check_regimes"


def test_unchecked_properties_are_named() -> None:
    line = trust_of("plan", "--model", "llama-3-8b", "--gpu", "l40s", "--data", "8", "--zero", "3", "--offload", "optimizer")[0]
    assert "no published run was checked on l40s; no published run was checked with offloading." in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "search", "--model", "mixtral-8x7b", "--gpus", "64"],
        ["plan", "serve", "--model", "llama-3-8b"],
        ["plan", "collectives", "--ranks", "64"],
    ],
)
def test_other_commands_print_expected_errors(words: list[str]) -> None:
    line, trust = trust_of(*words)
    assert line == trust["line"] and "\n" not in line


@pytest.mark.slow
def test_rows_are_in_the_regime_of_their_plan() -> None:
    """Nanotron is planned as Megatron-Core, since the catalogue has no such program."""
    for line in check_regimes._lines():
        words = shlex.split(line["command"])
        if words[0] in ("serve", "collectives") or line["regime"] == "memory":
            continue
        found = check_regimes.training([str(check_regimes.PUBLISHED / w) if w.startswith("cfg/") else w for w in words])
        own = [*regimes_of(found.shape, found.layout, found.sequence, found.software), "dense"][0]
        assert line["regime"] == ("other-program" if "nanotron" in line["source"] else own), line


@pytest.mark.slow
def test_the_documentation_has_the_figures_of_validate() -> None:
    docs = (ROOT / "docs" / "planner.md").read_text()
    for name in check_regimes.regime_names():
        errors = check_regimes.errors(check_regimes.regime(name))
        [row] = [line for line in docs.splitlines() if line.startswith(("| " + REGIMES[name], "| **" + REGIMES[name]))]
        for figure in (f"{errors.mean:.1%}", f"{errors.signed:+.1%}", f"{errors.lowest:+.0%}", f"{errors.highest:+.0%}"):
            assert figure.replace("-", "\u2212") in row, (figure, row)
        assert f"| {errors.figures} |" in row


def test_validation_rows_pass_the_checks_of_plans() -> None:
    shape = model("llama-3.1-405b")
    layout = Layout(data=64, tensor=8, pipeline=16, schedule="interleaved", interleave=8, batch=2048, sequence_parallel=True)
    refused = check_training._plan(shape, layout, 8192, "h100-sxm", "roce-400", "torch-fsdp")
    assert refused.step is None and "126 layers cannot be cut into 128 parts" in refused.note
    row = check_training.Row("table", "405B", 430.0, refused.seconds, note=refused.note)
    fine = check_training.Row("table", "8B", 1.0, 1.1)
    assert row.error is None and check_training.mean_error([row, fine]) == pytest.approx(0.1)


@pytest.mark.slow
def test_validate_marks_plans_that_do_not_fit() -> None:
    found = CliRunner().invoke(build(), ["plan", "validate"], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    assert "does not fit by plan: 133 GiB of 79.2 GiB" in found.stdout
    for name in check_regimes.regime_names():
        assert REGIMES[name] in found.stdout
    checks = {check.name: check for check in comparison.checks()}
    assert all(row.planned is not None for check in checks.values() for rows in check.tables.values() for row in rows)
