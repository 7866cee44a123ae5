"""vLLM's own memory profiling on a simulated GPU that two engines share: with vLLM's worker and with Strata's."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils import mem_utils
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.utils import request_memory

from strata.serving.gpu_sharing import claims, kv_sizes, own_memory, worker
from strata.serving.gpu_sharing.own_memory import OUTSIDE_TORCH, OwnMemory

GIB = 1 << 30
TOTAL = 141 * GIB
SHARE = 0.4


class Gpu:
    """A GPU with this process and others on it."""

    def __init__(self) -> None:
        self.own = 0  # reserved by PyTorch in this process
        self.peak = 0
        self.outside = 0  # of this process, outside of PyTorch
        self.others = GIB

    def info(self, device: object = None, /) -> tuple[int, int]:
        return TOTAL - self.own - self.outside - self.others, TOTAL

    def stats(self, device: object = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.own, "allocated_bytes.all.peak": max(self.peak, self.own)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    simulated = Gpu()
    monkeypatch.setattr(torch.accelerator, "get_memory_info", simulated.info)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device=None: simulated.own)
    monkeypatch.setattr(torch.accelerator, "memory_stats", simulated.stats)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(mem_utils.gc, "collect", lambda: 0)  # a second each, with vLLM imported
    monkeypatch.setattr(mem_utils.current_platform, "is_integrated_gpu", lambda index=0: False, raising=False)
    yield simulated


def engine(gpu: Gpu, kind: type, meanwhile: Callable[[], None], compiled: bool = False) -> Any:
    """A worker after its weights are loaded. `meanwhile`: what others do during its profile run."""
    made = kind.__new__(kind)
    made.cache_config = SimpleNamespace(gpu_memory_utilization=SHARE, kv_cache_memory_bytes=None)
    made.model_config = SimpleNamespace(multimodal_config=None, enforce_eager=not compiled, enable_sleep_mode=False)
    made.parallel_config = SimpleNamespace(world_size=1, _api_process_count=1)
    made.scheduler_config = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192)
    graphs = SimpleNamespace(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 4])
    made.vllm_config = SimpleNamespace(compilation_config=graphs, compute_hash=lambda: "same settings")
    made.rank = 0
    made.init_snapshot = MemorySnapshot(device=torch.device("cuda"))
    made.requested_memory = request_memory(made.init_snapshot, made.cache_config)
    gpu.own += 16 * GIB

    def profile_run() -> None:
        gpu.peak = gpu.own + 2 * GIB
        gpu.outside += GIB // 4
        meanwhile()

    made.model_runner = SimpleNamespace(profile_run=profile_run, model_memory_usage=16 * GIB)
    return made


def sharing(gpu: Gpu, meanwhile: Callable[[], None], tmp_path: Path, compiled: bool = False) -> Any:
    made = engine(gpu, worker.Worker, meanwhile, compiled)
    made._share = claims.claim(tmp_path / "claims", made.requested_memory, lambda: gpu.info()[0])
    before = made.init_snapshot
    end = own_memory.install(OwnMemory(before.free_memory, before.total_memory, before.torch_memory), before.device_)
    made._end_view = end
    return made


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "claims").mkdir()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(worker, "compute_plan_fingerprint", lambda *_: "this GPU")
    return tmp_path / "strata_kv_sizes"


def alone(gpu: Gpu) -> int:
    return int(engine(gpu, gpu_worker.Worker, lambda: None).determine_available_memory())


def test_vllm_measures_the_other_engine_too(gpu: Gpu) -> None:
    """The reason for this package. Without it, vLLM either fails or loses the other engine's memory."""

    def loads() -> None:
        gpu.others += 20 * GIB

    expected = alone(gpu)
    gpu.own = gpu.peak = gpu.outside = 0
    assert engine(gpu, gpu_worker.Worker, loads).determine_available_memory() == expected - 20 * GIB
    gpu.own = gpu.peak = gpu.outside = 0

    def ends() -> None:
        gpu.others -= 20 * GIB

    with pytest.raises(AssertionError, match="Error in memory profiling"):
        engine(gpu, gpu_worker.Worker, ends).determine_available_memory()


@pytest.mark.parametrize("change", [0, 60 * GIB, -GIB])
def test_kv_cache_does_not_depend_on_the_other_engine(gpu: Gpu, tmp_path: Path, change: int) -> None:
    def meanwhile() -> None:
        gpu.others += change

    expected = alone(gpu)
    gpu.own = gpu.peak = gpu.outside = 0
    found = sharing(gpu, meanwhile, tmp_path).determine_available_memory()
    assert found == expected - (OUTSIDE_TORCH - GIB // 4), "at most the fixed amount is lost"
    assert expected - found < 0.03 * expected


@pytest.mark.parametrize("sleeps", [False, True])
def test_device_is_claimed_before_vllm_measures_it(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    def init_device(self: Any) -> None:
        assert len(claims._read(tmp_path / "a GPU").claims) == 1
        self.device = torch.device("cuda")
        self.init_snapshot = MemorySnapshot(device=self.device)

    made = engine(gpu, worker.Worker, lambda: None)
    made.model_config.enable_sleep_mode, made.local_rank = sleeps, 0
    monkeypatch.setattr(gpu_worker.Worker, "init_device", init_device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a GPU"))
    platform = SimpleNamespace(logical_device_id_to_visible_device_id=lambda rank: rank)
    monkeypatch.setattr(worker, "current_platform", platform)
    monkeypatch.setattr(claims, "folder_of", lambda name: tmp_path / name)
    real = torch.accelerator.get_memory_info
    made.init_device()
    (claim,) = claims._read(tmp_path / "a GPU").claims.values()
    assert claim.alone == sleeps and claim.bytes == made.requested_memory + claims.BESIDE_SHARE
    assert (torch.accelerator.get_memory_info == real) == sleeps, "vLLM's allocator for sleep is measured by the whole GPU"
    started(made, monkeypatch)
    (claim,) = claims._read(tmp_path / "a GPU").claims.values()
    assert claim.started and torch.accelerator.get_memory_info == real


def started(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker.Worker, "compile_or_warm_up_model", lambda self: None)
    made.compile_or_warm_up_model()


def test_later_start_has_the_recorded_size_and_skips_the_measurement(
    gpu: Gpu, tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.accelerator.get_memory_info
    first = sharing(gpu, lambda: None, tmp_path)
    size = first.determine_available_memory()
    started(first, monkeypatch)
    assert torch.accelerator.get_memory_info == real, "after its start the engine sees the real memory"
    assert len(list(records.iterdir())) == 1
    gpu.own = gpu.peak = gpu.outside = 0
    second = sharing(gpu, lambda: None, tmp_path)
    assert second.determine_available_memory() == size == second.cache_config.kv_cache_memory_bytes
    assert not hasattr(second, "available_kv_cache_memory_bytes"), "vLLM did not measure"
    started(second, monkeypatch)
    assert len(list(records.iterdir())) == 1


@pytest.mark.parametrize("setting", ["share", "graphs", "sequences"])
def test_record_is_not_used_with_other_settings(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    first = sharing(gpu, lambda: None, tmp_path)
    first.determine_available_memory()
    started(first, monkeypatch)
    gpu.own = gpu.peak = gpu.outside = 0
    second = sharing(gpu, lambda: None, tmp_path)
    if setting == "share":
        second.requested_memory += GIB
    elif setting == "graphs":
        second.vllm_config.compilation_config.cudagraph_capture_sizes = [1]
    else:
        second.scheduler_config.max_num_seqs = 8
    second.determine_available_memory()
    assert second.cache_config.kv_cache_memory_bytes is None


def test_engine_that_fails_leaves_no_record(gpu: Gpu, tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sharing(gpu, lambda: None, tmp_path)
    made.determine_available_memory()

    def fails(self: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_worker.Worker, "compile_or_warm_up_model", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        made.compile_or_warm_up_model()
    assert not records.exists()


@pytest.mark.parametrize("content", ["", "null", "-1", '"many"', "{}"])
def test_damaged_record_is_measured_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "name.json").write_text(content)
    assert kv_sizes.read(tmp_path, "name") is None


def test_same_settings_compile_one_at_a_time(gpu: Gpu, tmp_path: Path) -> None:
    running, most = [0], [0]

    def compiles() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.3)
        running[0] -= 1

    profiles = [worker._one_compiles(compiles, settings) for settings in ("a", "a", "a")]
    threads = [threading.Thread(target=profile) for profile in profiles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1]


def test_lock_of_a_compilation_that_hangs_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "COMPILE_LIMIT_S", 0.3)
    with worker._turn(tmp_path / "lock"), worker._turn(tmp_path / "lock"):
        pass


def test_compilation_needs_no_folder_for_locks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with worker._turn(tmp_path / "file" / "lock"):
        pass


def test_vllm_still_measures_by_the_whole_gpu() -> None:
    """Fails when vLLM counts the memory of its own process: then this package is no longer needed."""
    assert "get_memory_info" in inspect.getsource(MemorySnapshot.measure)
    assert "init_free_memory >= free_gpu_memory" in inspect.getsource(gpu_worker.Worker.determine_available_memory)
