"""GPU readings of different cards and drivers, with `nvml_stand_in.py` in place of NVML."""

import os
import subprocess
import sys
from typing import Any

import psutil
import pynvml
import pytest
from support import starts_fast

from strata.monitoring.gpu.actors import UNKNOWN, actor_of
from strata.monitoring.gpu.health import Health
from strata.monitoring.gpu.nvml import Cards

from .nvml_stand_in import Nvml, recorded, recorded_cards


def cards(nvml: Any) -> Cards:
    return Cards(nvml, lambda pid: f"actor-{pid}")


def test_readings_are_in_base_units() -> None:
    serving, training = recorded_cards().read().gpus
    assert (serving.index, serving.name, serving.utilization) == (0, "NVIDIA H200", 0.87)
    assert (serving.memory_used, serving.memory_total) == (120832 * 2**20, 143771 * 2**20)
    assert serving.power == pytest.approx(512.34)
    assert (serving.power_limit, serving.temperature) == (700.0, 58.0)
    assert (serving.sm_clock, serving.sm_clock_max) == (1.98e9, 1.98e9)
    assert (serving.throttles, training.throttles) == (frozenset(), frozenset({"power"}))


def test_process_utilization_is_the_newest_valid_sample() -> None:
    serving, training = recorded_cards().read().gpus
    assert [(p.actor, p.utilization) for p in serving.processes] == [
        ("ServeReplica:strata:decode", 0.61),
        ("ServeReplica:strata:prefill", 0.26),
    ]
    assert [(p.actor, p.utilization) for p in training.processes] == [("RayTrainWorker", 0.98), ("unknown", 0.0)]


def test_process_utilization_is_zero_if_idle_and_none_if_unsupported() -> None:
    values = recorded()
    values[0]["process_samples"] = []
    nvml = Nvml(values)
    nvml.broken[1, "nvmlDeviceGetProcessUtilization"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    idle, unsupported = cards(nvml).read().gpus
    assert {p.utilization for p in idle.processes} == {0.0}
    assert {p.utilization for p in unsupported.processes} == {None}


@pytest.mark.parametrize(
    ("reasons", "throttles"),
    [
        (pynvml.nvmlClocksThrottleReasonGpuIdle, set()),
        (pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting | pynvml.nvmlClocksThrottleReasonSyncBoost, set()),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, {"power"}),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwSlowdown, {"thermal", "hardware"}),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, {"thermal"}),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, {"power"}),
    ],
)
def test_throttle_reasons_exclude_idle_and_user_clocks(reasons: int, throttles: set[str]) -> None:
    values = recorded()[:1]
    values[0]["throttle_reasons"] = reasons
    assert cards(Nvml(values)).read().gpus[0].throttles == frozenset(throttles)


def test_mig_card_has_no_utilization_and_lists_processes_once() -> None:
    values = recorded()
    values[0]["processes"] = [{"pid": 7, "memory": 100}, {"pid": 7, "memory": 50}, {"pid": 8, "memory": None}]
    nvml = Nvml(values)
    for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization"):
        nvml.broken[0, call] = pynvml.NVML_ERROR_NOT_SUPPORTED
    mig, whole = cards(nvml).read().gpus
    assert mig.utilization is None and mig.memory_total == 143771 * 2**20
    assert [(p.pid, p.memory, p.utilization) for p in mig.processes] == [(7, 150, None), (8, None, None)]
    assert whole.utilization == 0.99


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN])
def test_card_without_any_supported_value_is_listed(error: int) -> None:
    nvml = Nvml(recorded()[:1])
    nvml.broken |= {(0, name): error for name in vars(Nvml) if name.startswith("nvmlDeviceGet") and "Handle" not in name}
    nvml.broken[0, "nvmlDeviceGetMemoryInfo_v2"] = error
    [gpu] = cards(nvml).read().gpus
    assert (gpu.name, gpu.uuid, gpu.processes) == ("unknown", "unknown", ())
    assert {gpu.utilization, gpu.memory_used, gpu.memory_total, gpu.power, gpu.power_limit, gpu.temperature} == {None}
    assert (gpu.sm_clock, gpu.sm_clock_max, gpu.throttles) == (None, None, None)


def test_driver_without_memory_info_v2() -> None:
    nvml = Nvml()
    nvml.broken[0, "nvmlDeviceGetMemoryInfo_v2"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    old, new = cards(nvml).read().gpus
    assert old.memory_used == (120832 + 612) * 2**20, "version 1 includes memory reserved by the driver"
    assert new.memory_used == 131072 * 2**20


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature", "*"])
def test_lost_card_is_listed_and_others_are_read(call: str) -> None:
    nvml = Nvml()
    nvml.broken[0, call] = pynvml.NVML_ERROR_GPU_IS_LOST
    reading = cards(nvml).read()
    assert [(lost.index, lost.reason) for lost in reading.lost] == [(0, "GPU is lost")]
    assert [gpu.index for gpu in reading.gpus] == [1]
    assert reading.problem is None


def test_driver_missing_at_first_and_loaded_later() -> None:
    nvml = Nvml()
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    watched = cards(nvml)
    assert watched.read().problem == "NVML Shared Library Not Found"
    nvml.init_error = None
    assert len(watched.read().gpus) == len(watched.read().gpus) == 2
    assert nvml.opened == 1, "initialized once for all readings"
    watched.close()
    watched.close()
    assert nvml.opened == 0


def test_a_driver_without_cards() -> None:
    assert cards(Nvml([])).read().problem == "the driver lists none"


def test_real_nvml_returns_gpus_or_a_problem() -> None:
    reading = Cards().read()
    assert bool(reading.gpus or reading.lost) != bool(reading.problem)


def titled(title: str, child: str) -> list[str]:
    """Command of a process titled as a Ray worker, which starts a child titled as a vLLM engine."""
    sleep = "import time; print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess; subprocess.run([{child!r}, '-c', {sleep!r}], executable={sys.executable!r})"
    return [title, "-c", parent]


@pytest.mark.parametrize(
    ("title", "actor"),
    [
        ("ray::ServeReplica:strata:decode", "ServeReplica:strata:decode"),
        ("ray::ServeReplica:strata:llama-3.1.handle_request_streaming", "ServeReplica:strata:llama-3.1"),
        ("ray::RayTrainWorker.execute", "RayTrainWorker"),
        ("python3", None),
    ],
)
def test_engine_process_belongs_to_its_parent_actor(title: str, actor: str | None) -> None:
    process = subprocess.Popen(titled(title, "VLLM::EngineCore"), executable=sys.executable, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    [engine] = psutil.Process(process.pid).children()
    try:
        assert actor_of(engine.pid) == (actor or engine.name())
        assert actor_of(process.pid) == (actor or psutil.Process(process.pid).name())
    finally:
        engine.kill()
        process.wait()
        process.stdout.close()


def test_invisible_process_is_unknown() -> None:
    assert actor_of(2**22 - 1) == UNKNOWN
    assert actor_of(os.getpid()) != UNKNOWN


@pytest.mark.slow
def test_command_module_imports_nothing_heavy() -> None:
    probe = (
        "import sys, strata.monitoring.gpu_commands;"
        "assert not {'torch', 'ray', 'vllm', 'pynvml', 'httpx', 'prometheus_client'} & set(sys.modules)"
    )
    assert starts_fast(sys.executable, "-c", probe)


def test_errors_are_read_by_kind() -> None:
    healthy, damaged = (gpu.health for gpu in recorded_cards().read().gpus)
    assert healthy.ecc_errors == {"corrected": 3, "uncorrected": 0}
    assert damaged.ecc_errors == {"corrected": 0, "uncorrected": 1}
    assert damaged.remapped_rows == {"corrected": 0, "uncorrected": 1}
    assert damaged.row_remap == {"pending": True, "failed": False} and not any(healthy.row_remap.values())
    assert damaged.nvlink_errors == {"crc_flit": 12, "crc_data": 0, "replay": 2, "recovery": 1}


def test_card_without_ecc_row_remapping_or_nvlink_reports_none_of_them() -> None:
    """A card without NVLink answers the call, and refuses each counter."""
    values = recorded()
    values[1]["nvlink_errors"] = {}
    nvml = Nvml(values)
    for call in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"):
        nvml.broken[0, call] = pynvml.NVML_ERROR_NOT_SUPPORTED
    consumer, alone = (gpu.health for gpu in cards(nvml).read().gpus)
    assert consumer == Health({}, {}, {}, {})
    assert alone.nvlink_errors == {} and alone.ecc_errors
