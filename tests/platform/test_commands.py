"""The `strata` command as a user types it."""

import importlib.metadata
import subprocess
from typing import Any

import pytest
from support import STRATA, starts_fast
from typer.main import get_command

from strata.platform import cli, doctor, recipe_file, runs


def strata(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STRATA, *words], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_help_is_fast_and_lists_all_commands() -> None:
    assert starts_fast(STRATA, "--help")
    text = strata("--help").stdout
    assert all(command in text for command in ("train", "export", "serve", "chat", "runs", "doctor", "bench", "cluster"))


@pytest.mark.parametrize(
    ("words", "commands", "plans"), [(["plan", "--help"], {"plan"}, True), (["--help"], None, False), (["pln"], None, False)]
)
def test_a_command_line_imports_what_it_needs(words: list[str], commands: set[str] | None, plans: bool) -> None:
    """None: all commands, in a list without their subcommands."""
    found: Any = get_command(cli.build(words))
    every: Any = get_command(cli.build())
    assert set(found.commands) == (commands or set(every.commands))
    assert set(found.commands["plan"].commands) == (set(every.commands["plan"].commands) if plans else set())


@pytest.mark.slow
def test_version() -> None:
    assert strata("--version").stdout == f"strata {importlib.metadata.version('strata')}\n"


@pytest.mark.slow
def test_errors_name_cause_and_fix_and_exit_nonzero() -> None:
    answer = strata("serve", "--run", "nowhere")
    assert answer.returncode == 1
    assert answer.stderr == "error: There is no run 'nowhere'.\n  fix: See 'strata runs', or train one with 'make train'.\n"


@pytest.mark.slow
def test_runs_are_listed() -> None:
    assert "No runs yet" in strata("runs").stdout
    run = runs.create("mine", recipe_file.load(), "laptop")
    run.write_state(runs.State("finished", step=300, steps=300, loss=3.21, val_loss=3.456))
    row = next(line for line in strata("runs").stdout.splitlines() if "mine" in line)
    assert row.split() == ["mine", "finished", "300/300", "3.210", "3.456", "-"]


@pytest.mark.slow
def test_doctor_passes_on_this_machine() -> None:
    answer = strata("doctor")
    assert answer.returncode == 0, answer.stdout
    assert all(part in answer.stdout for part in ("cores", "memory", "gpus", "torch", "ray", "vllm", "nixl", "port"))


@pytest.mark.slow
def test_doctor_reports_missing_memory_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**30)
    monkeypatch.setattr(doctor, "PACKAGES", (("no-such-package", "nothing works"),))
    fails = {finding.part: finding.text for finding in doctor.examine() if finding.verdict == "fails"}
    assert "needs 8 GiB free" in fails["memory"]
    assert fails["no-such-package"] == "not installed, so nothing works: run 'make setup'"
