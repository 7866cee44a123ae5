"""`strata serve` from start to stop: what it refuses, and what it leaves behind (nothing)."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from support import STRATA, Served, start_serving

from strata.platform import ports, runs
from strata.platform.errors import UserError
from strata.platform.recipe_file import load
from strata.serving import choice, endpoint


def test_too_little_memory_is_said_before_anything_starts(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "available_memory", lambda: 2**29)
    with pytest.raises(UserError, match=r"needs about \d+\.\d GiB of memory; 0.5 are free"):
        endpoint.check(load().serve, trained / "runs" / "tiny" / "export")


def test_a_run_without_export_says_how_to_get_one(own_home: Path) -> None:
    runs.create("bare", load(), "laptop")
    with pytest.raises(UserError, match=r"has no export[\s\S]*strata export bare"):
        choice.choose([], "bare", None, None)


def test_a_choice_can_be_made_again(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up benchmark passes it on to `strata serve`: settings lost there would make the comparison unfair."""
    monkeypatch.setenv("STRATA_HOME", str(trained))
    chosen = choice.choose(["serve.eager=false"], "tiny", None, None)
    assert chosen.section.eager is False
    assert chosen.words == ("--run", "tiny", "serve.eager=false")


def serve(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STRATA, "serve", *words], env=os.environ | {"STRATA_HOME": str(home)}, capture_output=True, text=True, timeout=300
    )


def test_a_port_in_use(trained: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = serve(trained, f"serve.port={taken.getsockname()[1]}")
    assert answer.returncode == 1
    assert "is in use" in answer.stderr and "serve.port=" in answer.stderr


def test_a_model_vllm_does_not_know(trained: Path, tmp_path: Path) -> None:
    """Its files are whole, so only vLLM can tell: the engine's own words come back, and no process stays."""
    strange = tmp_path / "strange"
    shutil.copytree(trained / "runs" / "tiny" / "export", strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    with ports.reserve() as held:
        answer = serve(trained, "--model", str(strange), f"serve.port={held.port}")
    assert answer.returncode == 1
    assert "vLLM cannot serve this model" in answer.stderr and "NoSuchForCausalLM" in answer.stderr
    assert not _engines()


def _engines() -> list[psutil.Process]:
    """vLLM engines that no living endpoint owns."""
    engines = [p for p in psutil.process_iter(["name", "ppid"]) if p.info["name"] == "VLLM::EngineCor"]
    return [p for p in engines if p.info["ppid"] == 1]


def test_no_process_outlives_a_command_that_was_killed(trained: Path) -> None:
    """One that was asked to end is looked at where the session's endpoint ends, in conftest.py."""
    served, process = start_serving(trained, trained)
    try:
        served.wait_until_it_answers()
        family = served.process.children(recursive=True)
        assert len([p for p in family if p.name().startswith("VLLM")]) == 2
    finally:
        process.kill()
    process.wait(timeout=60)
    family = [p for p in family if not _name(p).startswith(("ray::DashboardA", "ray::RuntimeEnv"))]  # they take a minute
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_chat_talks_to_the_endpoint(endpoint: Served) -> None:
    done = subprocess.run(
        [STRATA, "chat", "--url", endpoint.url, "--max-tokens", "5"],
        input="import os\n\ndef f\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert endpoint.model in done.stdout
    assert len(done.stdout.splitlines()) >= 3
