"""Division of a GPU's memory: the rule, and real processes that claim, wait and die."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strata.serving.gpu_sharing import claims
from strata.serving.gpu_sharing.claims import BESIDE_SHARE, Claim, Ledger, with_claim

GIB = 1 << 30
TOTAL = 141 * GIB
SHARE = int(0.4 * TOTAL)
# Claims a share in a process of its own, prints a line, and holds it until a line comes: then it has started.
CLAIMANT = """
import sys
from pathlib import Path
from strata.serving.gpu_sharing import claims
folder, share, free, alone = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "alone"
held = claims.claim(folder, share, lambda: int(free.read_text()), alone)
print("alone" if held.alone else "beside", flush=True)
sys.stdin.readline()
held.started()
print("started", flush=True)
sys.stdin.readline()
"""


def add(ledger: Ledger, name: str, share: int, free: int = 0, alone: bool = False) -> Ledger | None:
    return with_claim(ledger, set(ledger.claims), name, share, free, alone)


def test_pair_starts_at_once_and_a_third_engine_waits() -> None:
    first = add(Ledger(), "prefill", SHARE, free=TOTAL - GIB)
    assert first == Ledger(TOTAL - GIB, {"prefill": Claim(SHARE + BESIDE_SHARE)})
    both = add(first, "decode", SHARE, free=TOTAL - 20 * GIB)
    assert both is not None and both.free == TOTAL - GIB, "what the first has allocated is in its claim already"
    assert add(both, "third", SHARE, free=TOTAL - 40 * GIB) is None, "free memory is not yet used, but claimed"
    assert add(both, "small", int(0.1 * TOTAL), free=TOTAL - 40 * GIB) is not None


def test_started_engines_count_until_all_have_started() -> None:
    ledger = Ledger(TOTAL, {"a": Claim(SHARE, started=True), "b": Claim(SHARE)})
    assert add(ledger, "third", SHARE, free=TOTAL - SHARE) is None
    done = Ledger(TOTAL, {"a": Claim(SHARE, started=True), "b": Claim(SHARE, started=True)})
    left = TOTAL - 2 * SHARE
    found = add(done, "third", SHARE, free=left)
    assert found == Ledger(left, {"third": Claim(SHARE + BESIDE_SHARE, alone=True)}), "vLLM refuses it with the reason"


def test_dead_engines_do_not_count() -> None:
    ledger = Ledger(TOTAL, {"dead": Claim(SHARE), "living": Claim(SHARE)})
    found = with_claim(ledger, {"living"}, "next", SHARE, TOTAL - 2 * SHARE, False)
    assert found is not None and found.claims.keys() == {"living", "next"}


def test_restart_beside_a_serving_engine_does_not_wait() -> None:
    serving = Ledger(TOTAL, {"decode": Claim(SHARE, started=True), "prefill": Claim(SHARE, started=True)})
    found = with_claim(serving, {"decode"}, "prefill again", SHARE, TOTAL - SHARE - 2 * GIB, False)
    assert found is not None and not found.claims["prefill again"].alone


def test_shares_without_memory_beside_them_start_one_after_the_other() -> None:
    half = TOTAL // 2
    first = add(Ledger(), "a", half - GIB, free=TOTAL - GIB // 2)
    assert first is not None and not first.claims["a"].alone
    assert add(first, "b", half - GIB, free=TOTAL - GIB // 2) is None, "two CUDA contexts would not fit"
    tight = add(Ledger(), "a", TOTAL - GIB, free=TOTAL - GIB // 2)
    assert tight is not None and tight.claims["a"].alone
    assert add(tight, "b", GIB, free=TOTAL) is None, "its memory is measured by the GPU's"


def test_engine_that_must_start_alone_waits_and_is_waited_for() -> None:
    ledger = Ledger(TOTAL, {"a": Claim(SHARE)})
    assert add(ledger, "sleeps", SHARE, free=TOTAL, alone=True) is None
    found = add(Ledger(), "sleeps", SHARE, free=TOTAL, alone=True)
    assert found is not None and found.claims["sleeps"].alone


class Gpu:
    """Claimants of one GPU, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.free = folder / "gpu", folder / "free"
        self.free.write_text(str(TOTAL))
        self._started: list[subprocess.Popen[str]] = []

    def claimant(self, share: int = SHARE, alone: bool = False) -> subprocess.Popen[str]:
        words = [str(self.folder), str(share), str(self.free), "alone" if alone else ""]
        process = subprocess.Popen(
            [sys.executable, "-c", CLAIMANT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def line(process: subprocess.Popen[str], limit_s: float = 30.0) -> str:
    """Next line of a claimant; empty after the limit."""
    found: list[str] = []
    reading = threading.Thread(target=lambda: found.append(process.stdout.readline().strip()), daemon=True)  # type: ignore[union-attr]
    reading.start()
    reading.join(limit_s)
    return found[0] if found else ""


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def gpu(tmp_path: Path) -> "Gpu":
    return Gpu(tmp_path)


@pytest.fixture(autouse=True)
def ended(gpu: Gpu) -> object:
    yield
    gpu.end()


def test_two_engines_claim_at_once(gpu: Gpu) -> None:
    first, second = gpu.claimant(), gpu.claimant()
    assert (line(first), line(second)) == ("beside", "beside")


def test_third_waits_until_those_before_it_have_started(gpu: Gpu) -> None:
    first, second = gpu.claimant(), gpu.claimant()
    assert (line(first), line(second)) == ("beside", "beside")
    third = gpu.claimant()
    go_on(first)
    assert line(first) == "started"
    waiting: list[str] = []
    reading = threading.Thread(target=lambda: waiting.append(line(third)), daemon=True)
    reading.start()
    time.sleep(1.5)
    assert third.poll() is None and not waiting, "the second is still starting"
    gpu.free.write_text(str(TOTAL - SHARE))
    go_on(second)
    reading.join(20)
    assert waiting == ["beside"]


def test_killed_engine_frees_its_share(gpu: Gpu) -> None:
    first, second = gpu.claimant(), gpu.claimant()
    assert (line(first), line(second)) == ("beside", "beside")
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = gpu.claimant()
    assert line(again) == "beside", "the second has not started, but the first is dead"


def test_kill_while_the_ledger_is_locked_blocks_nobody(gpu: Gpu) -> None:
    os.mkfifo(pipe := gpu.free.with_name("never"))
    stuck = subprocess.Popen([sys.executable, "-c", CLAIMANT, str(gpu.folder), "1", str(pipe), ""])
    deadline = time.monotonic() + 30
    while not (gpu.folder / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    stuck.kill()
    stuck.wait()
    assert line(gpu.claimant()) == "beside"


def test_engine_alone_waits_for_others(gpu: Gpu) -> None:
    first = gpu.claimant()
    assert line(first) == "beside"
    alone = gpu.claimant(alone=True)
    waiting: list[str] = []
    reading = threading.Thread(target=lambda: waiting.append(line(alone)), daemon=True)
    reading.start()
    time.sleep(1.0)
    assert not waiting
    go_on(first)
    reading.join(20)
    assert waiting == ["alone"]


def test_memory_of_a_killed_engine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LOOK_S", 0.01)
    answers = iter([GIB, GIB, TOTAL])
    assert not claims.claim(tmp_path, SHARE, lambda: next(answers)).alone
    assert next(answers, None) is None


def test_lasting_lack_of_memory_is_left_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RELEASE_S", 0.1)
    assert claims.claim(tmp_path, SHARE, lambda: GIB).alone


def test_wait_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LIMIT_S", 0.5)
    held = claims.claim(tmp_path, SHARE, lambda: TOTAL)
    with pytest.raises(TimeoutError, match="Other engines have been starting"):
        claims.claim(tmp_path, TOTAL, lambda: TOTAL)
    assert len(json.loads((tmp_path / "ledger.json").read_text())["claims"]) == 1
    held.started()


def test_each_start_cleans_up_after_those_before(tmp_path: Path) -> None:
    for _ in range(5):
        claims.claim(tmp_path / "gpu", SHARE, lambda: TOTAL).started()
    assert len(list((tmp_path / "gpu").iterdir())) == 3, "the lock, the ledger and the last claim"
