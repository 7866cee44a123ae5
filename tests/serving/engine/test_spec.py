"""Settings of engines and gateways from the serve section, role by role."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.platform.recipe import PoolSection, ServeSection
from strata.platform.recipe.serve import FilesSection
from strata.serving import mps
from strata.serving.routing.policy import Rule
from strata.serving.spec import EngineSpec, GatewaySpec, Network, Role

NETWORK = Network("127.0.0.1", b"s" * 32)
GPU: dict[str, Any] = {"device": "gpu"}
SHARED: dict[str, Any] = {"gpus": 0.5, "gpu_memory": 0.4}


def spec_of(role: Role = "decode", **serve: Any) -> EngineSpec:
    return EngineSpec.of(role, ServeSection(**serve), Path("/models/m"), "m", NETWORK)


def test_links_of_one_machine_stay_on_the_loopback_interface() -> None:
    local, cluster = Network.within(one_machine=True), Network.within(one_machine=False)
    assert (local.host, cluster.host) == ("127.0.0.1", None)
    assert len(local.secret) == 32 and local.secret != cluster.secret


def test_every_setting_reaches_the_engine() -> None:
    spec = spec_of(
        dtype="bfloat16",
        eager=True,
        max_sequences=7,
        kv_cache_gib=3,
        prefix_caching=False,
        tool_parser="hermes",
        reasoning_parser="r1",
        remote_prefill={"when": "always", "min_tokens": 9, "max_queue_s": 4.0, "stall_weight": 0.75},
    )
    assert (spec.role, spec.model_id, spec.model_dir, spec.device, spec.dtype) == ("decode", "m", "/models/m", "cpu", "bfloat16")
    assert (spec.max_sequences, spec.kv_cache_gib, spec.tool_parser, spec.reasoning_parser) == (7, 3, "hermes", "r1")
    assert spec.rule == Rule("always", 9, 4.0, 0.75) and spec.network == NETWORK
    assert spec.eager and not spec.prefix_caching and not spec.our_kernels and not spec.on_own_nodes
    kwargs = spec.engine_kwargs()
    assert kwargs["dtype"] == "bfloat16" and kwargs["enforce_eager"] is True and kwargs["max_num_seqs"] == 7
    assert kwargs["enable_prefix_caching"] is False and kwargs["enable_logging_iteration_details"] is True
    assert kwargs["reasoning_parser"] == "r1" and "reasoning_parser" not in spec_of().engine_kwargs()
    assert spec.frontend_kwargs() == {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    assert spec_of().frontend_kwargs() == {}


def test_arguments_of_a_pool_override_those_of_all() -> None:
    pools: dict[str, Any] = {"engine": {"seed": 1, "max_model_len": 9}, "decode": {"engine": {"seed": 2}}}
    assert (
        spec_of("decode", **pools).engine_kwargs() | {"seed": 2, "max_model_len": 9} == spec_of("decode", **pools).engine_kwargs()
    )
    assert spec_of("prefill", **pools).extra_engine_args == {"seed": 1, "max_model_len": 9}


def test_caches_of_both_pools_have_the_same_dtype() -> None:
    for role in ("prefill", "decode"):
        assert spec_of(role, kv_cache_dtype="fp8").engine_kwargs()["kv_cache_dtype"] == "fp8"
        assert spec_of(role).engine_kwargs()["kv_cache_dtype"] == "auto"
    with pytest.raises(ValueError, match=r"set serve\.kv_cache_dtype"):
        ServeSection(prefill=PoolSection(engine={"kv_cache_dtype": "fp8"}))


@pytest.mark.parametrize(
    ("cpus", "prefill", "decode", "threads"),
    [
        (16, {"replicas": 1}, {"replicas": 3}, 4),
        (17, {"replicas": 1}, {"replicas": 2}, 5),
        (2, {"replicas": 3}, {"replicas": 2}, 1),
    ],
)
def test_cores_are_divided_among_the_engines(
    monkeypatch: pytest.MonkeyPatch, cpus: int, prefill: dict[str, Any], decode: dict[str, Any], threads: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    assert spec_of(prefill=prefill, decode=decode).threads == threads


def test_threads_count_the_largest_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 24)
    pools: dict[str, Any] = {"prefill": {"replicas": 1, "max_replicas": 2}, "decode": {"replicas": 1, "max_replicas": 4}}
    assert spec_of(**pools).threads == 4
    assert spec_of("decode", **pools).cpus() == 4.0 and spec_of("prefill", **pools).cpus() == 2.0
    gpu = spec_of("decode", **GPU, **pools)
    assert gpu.cpus() == 8.0, "two CPUs each"
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert spec_of(**pools).threads == 1


@pytest.mark.parametrize(
    ("serve", "resources"),
    [
        ({}, {"num_cpus": 1}),
        ({**GPU, "decode": {"gpus": 2, "tensor_parallel": 2}}, {"num_cpus": 2, "num_gpus": 2}),
        ({**GPU, "decode": SHARED}, {"num_cpus": 2, "num_gpus": 0.5}),
    ],
)
def test_resources_of_a_replica(serve: dict[str, Any], resources: dict[str, Any]) -> None:
    spec = spec_of(**serve)
    assert spec.resources() == resources
    assert replace(spec, on_own_nodes=True).resources() == resources | {"resources": {"strata-decode": 1}}


@pytest.mark.parametrize(("prefill", "disaggregated"), [(0, False), (1, True), (2, True)])
def test_blocks_are_transferred_only_with_a_prefill_pool(prefill: int, disaggregated: bool) -> None:
    spec = spec_of(prefill={"replicas": prefill})
    assert spec.disaggregated is disaggregated
    assert ("kv_transfer_config" in spec.engine_kwargs()) is disaggregated
    assert GatewaySpec.of(ServeSection(prefill={"replicas": prefill}), "m", NETWORK).disaggregated is disaggregated


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_transfer_settings(role: Role, kv_role: str) -> None:
    common = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 12},
    }
    split, whole = (f"strata.serving.vllm_patches.{name}" for name in ("side_channel", "nixl_layout"))
    assert spec_of(role).engine_kwargs()["kv_transfer_config"] == common | {
        "kv_connector_module_path": split,
        "kv_buffer_device": "cpu",
    }
    assert spec_of(role, **GPU).engine_kwargs()["kv_transfer_config"] == common | {"kv_connector_module_path": whole}
    unequal = spec_of(role, **GPU, decode={"gpus": 2, "tensor_parallel": 2})
    assert unequal.engine_kwargs()["kv_transfer_config"] == common | {"kv_connector_module_path": split}


def test_gpu_engines_have_their_share_and_large_blocks() -> None:
    kwargs = spec_of(**GPU, decode={"gpus": 2, "tensor_parallel": 2, "gpu_memory": 0.7}).engine_kwargs()
    assert (kwargs["tensor_parallel_size"], kwargs["distributed_executor_backend"]) == (2, "mp")
    assert (kwargs["gpu_memory_utilization"], kwargs["block_size"]) == (0.7, 128)
    single = spec_of(**GPU, prefill={"replicas": 0}).engine_kwargs()
    assert (single["tensor_parallel_size"], single["distributed_executor_backend"]) == (1, "uni")
    assert "block_size" not in single, "nothing is transferred"
    on_cpu = spec_of().engine_kwargs()
    assert not {"tensor_parallel_size", "gpu_memory_utilization"} & on_cpu.keys() and on_cpu["block_size"] == 32


STRATA = {**GPU, "kernels": "strata"}


@pytest.mark.parametrize(
    ("role", "serve", "step"),
    [
        ("decode", {**GPU}, 2048),
        ("decode", {**GPU, "max_sequences": 2048}, 2048),
        ("decode", {**GPU, "max_sequences": 2049}, 2049),
        ("decode", STRATA, 512),
        ("decode", {**STRATA, "max_sequences": 513}, 513),
        ("decode", {**GPU, "decode": {"step_tokens": 300}}, 300),
        ("decode", {**GPU, "prefill": {"replicas": 0}}, None),
        ("decode", {**GPU, "prefill": {"replicas": 0}, "decode": {"step_tokens": 300}}, 300),
        ("prefill", {**GPU}, None),
        ("prefill", {**GPU, "prefill": {"step_tokens": 300}}, 300),
        ("decode", {}, None),
    ],
)
def test_token_budget_of_a_step(role: Role, serve: dict[str, Any], step: int | None) -> None:
    assert spec_of(role, **serve).engine_kwargs().get("max_num_batched_tokens") == step


@pytest.mark.parametrize(("step", "largest"), [(300, 300), (1024, 1024), (1025, None)])
def test_steps_up_to_1024_tokens_are_captured_in_graphs(step: int, largest: int | None) -> None:
    config = spec_of(**STRATA, decode={"step_tokens": step}).engine_kwargs()["compilation_config"]
    assert config.get("max_cudagraph_capture_size") == largest and config["cudagraph_mode"] == "FULL"
    assert "compilation_config" not in spec_of(**GPU, decode={"step_tokens": step}).engine_kwargs()


COMMON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_XGRAMMAR_CACHE_MB": "128",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_XGRAMMAR_CACHE_MB", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_environment_of_a_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    expected = COMMON | {
        "OMP_NUM_THREADS": "3",
        "VLLM_CPU_KVCACHE_SPACE": "5",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GOMP_SPINCOUNT": "1000",
        "NUMBA_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "STRATA_NIXL_DELAY_US": "1000",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    assert spec_of(kv_cache_gib=5).environment() == expected
    assert spec_of(kv_cache_gib=5, eager=True).environment() == expected | {"TORCH_COMPILE_DISABLE": "1"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert spec_of(kv_cache_gib=5).environment() == expected | {"GOMP_SPINCOUNT": "7"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in spec_of(kv_cache_gib=5).environment()


def test_eager_cpu_engines_have_a_worker_of_their_own() -> None:
    assert spec_of(eager=True).engine_kwargs()["worker_cls"] == "strata.serving.engine.cpu_worker.Worker"
    assert "worker_cls" not in spec_of().engine_kwargs(), "compiled kernels have a fixed number of threads"


def test_environment_of_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = COMMON | {"OMP_NUM_THREADS": "1", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
    assert spec_of(**GPU).environment() == expected
    ours = spec_of(**STRATA).environment()
    assert ours.items() > expected.items()
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "64")
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "auto")
    assert spec_of(**GPU).environment() == expected | {
        "VLLM_XGRAMMAR_CACHE_MB": "64",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto",
    }


def test_engines_that_share_a_gpu_through_mps() -> None:
    shares: dict[str, Any] = {**GPU, "prefill": SHARED | {"sm_share": 0.3}, "decode": SHARED}
    pipe = f"{tempfile.gettempdir()}/strata-mps-{os.getuid()}-{os.getpid()}"
    prefill, decode = (spec_of(role, **shares).environment() for role in ("prefill", "decode"))  # type: ignore[arg-type]
    assert prefill["CUDA_MPS_PIPE_DIRECTORY"] == decode["CUDA_MPS_PIPE_DIRECTORY"] == pipe
    assert (prefill["CUDA_MPS_CLIENT_PRIORITY"], decode["CUDA_MPS_CLIENT_PRIORITY"]) == ("1", "0")
    assert prefill["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in decode


@pytest.mark.parametrize(
    ("serve", "wanted"),
    [
        ({**GPU}, False),
        ({**GPU, "prefill": SHARED | {"sm_share": 0.5}}, True),
        ({**GPU, "decode": SHARED | {"sm_share": 1.0}}, True),
        ({"device": "cpu", "decode": SHARED | {"sm_share": 1.0}}, False),
    ],
)
def test_mps_is_for_gpus_with_an_sm_share(serve: dict[str, Any], wanted: bool) -> None:
    assert mps.wanted(ServeSection(**serve)) is wanted
    assert spec_of(**serve).uses_mps is wanted


def test_mps_share_is_a_percentage() -> None:
    assert mps.environment(0.125, gives_way=False)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
    assert mps.environment(None, gives_way=True).keys() == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY"}


def test_mps_daemon_of_a_cluster_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with mps.running(ServeSection(**GPU, decode=SHARED | {"sm_share": 0.5})):
        assert not mps.pipes().exists()


def test_every_setting_reaches_the_gateway() -> None:
    serve = ServeSection(host="::1", port=81, gateways=3, decode={"replicas": 5}, max_sequences=7, max_queue=11)
    spec = GatewaySpec.of(serve, "m", NETWORK)
    assert spec.section == serve.model_dump(mode="json", exclude={"models"}) and spec.files.folder is not None
    spec = replace(spec, section={}, files=FilesSection())
    assert spec == GatewaySpec("m", ("m",), "::1", 81, 3, 5, 7, 11, True, NETWORK, None, False, False, routes_by_prefix=True)


@pytest.mark.parametrize(("running", "capacity"), [(0, 46), (4, 46), (5, 46), (6, 53), (9, 74)])
def test_capacity_counts_replicas_that_are_being_replaced(running: int, capacity: int) -> None:
    serve = ServeSection(decode={"replicas": 5}, max_sequences=7, max_queue=11)
    assert GatewaySpec.of(serve, "m", NETWORK).capacity(running) == capacity  # 7 * max(running, 5) + 11
