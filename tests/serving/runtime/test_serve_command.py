"""`strata serve`: errors at the start, and no processes left after the end."""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support import STRATA, Served, start_serving

from strata.platform import ports, runs
from strata.platform.errors import UserError
from strata.platform.recipe_file import load
from strata.serving.models import choice
from strata.serving.runtime import endpoint
from strata.serving.runtime.models import checks


def test_too_little_memory_is_reported_before_the_start(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 2**29)
    with pytest.raises(UserError, match=r"needs about \d+\.\d GiB of memory; 0.5 are free"):
        endpoint.check(load().serve, trained / "runs" / "tiny" / "export")


def test_run_without_export_names_the_command(own_home: Path) -> None:
    runs.create("bare", load(), "laptop")
    with pytest.raises(UserError, match=r"has no export[\s\S]*strata export bare"):
        choice.choose([], "bare", None, None)


def test_choice_is_passed_on_as_arguments(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up benchmark passes them to `strata serve`. Lost settings would make the comparison unfair."""
    monkeypatch.setenv("STRATA_HOME", str(trained))
    chosen = choice.choose(["serve.eager=false"], "tiny", None, None)
    assert chosen.section.eager is False
    assert chosen.words == ("--run", "tiny", "serve.eager=false")


def serve(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STRATA, "serve", *words], env=os.environ | {"STRATA_HOME": str(home)}, capture_output=True, text=True, timeout=300
    )


def test_port_in_use(trained: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = serve(trained, f"serve.port={taken.getsockname()[1]}")
    assert answer.returncode == 1
    assert "is in use" in answer.stderr and "serve.port=" in answer.stderr


@pytest.mark.rotation
def test_model_unknown_to_vllm(trained: Path, tmp_path: Path) -> None:
    """The files are valid, so only vLLM can refuse it: its message is printed, and no process is left."""
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
    """vLLM engines without a living parent."""
    engines = [p for p in psutil.process_iter(["name", "ppid"]) if p.info["name"] == "VLLM::EngineCor"]
    return [p for p in engines if p.info["ppid"] == 1]


@pytest.mark.rotation
def test_no_process_outlives_a_killed_command(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """conftest.py checks the same for a command that is stopped. This endpoint requires API keys, also for its warm-up."""
    file = tmp_path / "keys"
    file.write_text("a-key\n")
    monkeypatch.setenv("STRATA_API_KEYS_FILE", str(file))
    served, process = start_serving(trained, trained)
    try:
        _wait_until_claimed(served.port.port)
        second = serve(trained, "--run", "tiny", f"serve.port={served.port.port}")
        assert second.returncode == 1 and f"Port {served.port.port} on 127.0.0.1 is in use" in second.stderr
        served.wait_until_ready()
        request = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{served.url}/v1/completions", json=request).status_code == 401
        with_key = httpx.post(f"{served.url}/v1/completions", json=request, headers={"authorization": "Bearer a-key"})
        assert with_key.status_code == 200, with_key.text
        descendants = served.process.children(recursive=True)
        assert len([p for p in descendants if p.name().startswith("VLLM")]) == 2
    finally:
        process.kill()
    process.wait(timeout=60)
    descendants = [
        p for p in descendants if not _name(p).startswith(("ray::DashboardA", "ray::RuntimeEnv"))
    ]  # these need a minute
    _, alive = psutil.wait_procs(descendants, timeout=30)
    assert not alive


def _wait_until_claimed(port: int) -> None:
    """The port is claimed long before a server listens."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ports.claim(port, "127.0.0.1", "serve.port").release()
        except UserError:
            return
        time.sleep(0.2)
    raise AssertionError("the endpoint has not claimed its port")


@pytest.mark.rotation
def test_engine_death_during_the_start_ends_it(trained: Path) -> None:
    served, process = start_serving(trained, trained, "serve.prefill.replicas=0")
    try:
        deadline = time.monotonic() + 200
        while not (engines := [p for p in served.process.children(recursive=True) if _name(p).startswith("VLLM")]):
            assert process.poll() is None and time.monotonic() < deadline, served.output.read_text()
            time.sleep(0.05)
        descendants = served.process.children(recursive=True)
        engines[0].kill()
        assert process.wait(timeout=120) == 1
    finally:
        process.kill()
    printed = served.output.read_text()
    assert (
        "An engine ended while it started" in printed and "fix:" in printed and "Traceback (most recent call last)" not in printed
    )
    descendants = [p for p in descendants if not _name(p).startswith(("ray::DashboardA", "ray::RuntimeEnv"))]
    _, alive = psutil.wait_procs(descendants, timeout=30)
    assert not alive
    assert ports.is_free(served.port.port)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'"])
def test_public_host_needs_api_keys(trained: Path, host: str) -> None:
    answer = serve(trained, "--run", "tiny", f"serve.host={host}")
    assert answer.returncode == 1
    assert "without an API key" in answer.stderr and "serve.allow_unauthenticated=true" in answer.stderr


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_chat(endpoint: Served) -> None:
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
