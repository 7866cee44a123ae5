"""Engine arguments of a prefill and a decode engine on GPUs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.bench.contenders import engines
from strata.serving.spec import CPU_WORKER, EngineSpec, Network, Role

ROLES: tuple[Role, ...] = ("prefill", "decode")
ANY_LAYOUT = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
WHOLE = "strata.serving.vllm_patches.nixl_layout"


def settings(*overrides: str, recipe: str = "h200") -> tuple[dict[str, Any], dict[str, Any]]:
    section, network = recipe_file.load(recipe, list(overrides)).serve, Network.within(one_machine=True)
    prefill, decode = (EngineSpec.of(role, section, Path("/model"), "m", network).engine_kwargs() for role in ROLES)
    return prefill, decode


def test_decode_engine_has_small_steps_by_default() -> None:
    prefill, decode = settings("serve.kernels=vllm")
    assert "max_num_batched_tokens" not in prefill and decode["max_num_batched_tokens"] == 2048
    prefill, decode = settings("serve.prefill.step_tokens=4096", "serve.decode.step_tokens=1024")
    assert (prefill["max_num_batched_tokens"], decode["max_num_batched_tokens"]) == (4096, 1024)
    _, decode = settings("serve.max_sequences=4000")
    assert decode["max_num_batched_tokens"] == 4000, "vLLM requires one token per sequence"


def test_small_steps_are_full_cuda_graphs_with_strata_kernels() -> None:
    prefill, decode = settings("serve.max_sequences=32")
    assert prefill["compilation_config"] == {"cudagraph_mode": "FULL"}
    assert decode["max_num_batched_tokens"] == 512
    whole = {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert decode["compilation_config"] == whole, "vLLM would capture twice max_sequences only"
    _, decode = settings("serve.decode.step_tokens=8192")
    assert "max_cudagraph_capture_size" not in decode["compilation_config"], "each size takes time and memory at the start"
    _, decode = settings("serve.decode.engine={compilation_config: {cudagraph_mode: PIECEWISE}}")
    assert decode["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    _, decode = settings("serve.kernels=vllm", "serve.decode.step_tokens=512")
    assert "compilation_config" not in decode, "vLLM's kernels are wrong in such graphs"


def test_recipe_can_set_other_vllm_arguments() -> None:
    for_all, for_one = (
        "serve.engine={max_model_len: 4096, seed: 1}",
        "serve.decode.engine={seed: 2, long_prefill_token_threshold: 512}",
    )
    prefill, decode = settings(for_all, for_one)
    assert (prefill["max_model_len"], prefill["seed"]) == (4096, 1) and "long_prefill_token_threshold" not in prefill
    assert (decode["max_model_len"], decode["seed"], decode["long_prefill_token_threshold"]) == (4096, 2, 512)
    with pytest.raises(recipe_file.RecipeError, match="'dtype' is not set here"):
        settings("serve.engine={dtype: float16}")
    with pytest.raises(recipe_file.RecipeError, match="'kv_transfer_config' is not set here"):
        settings("serve.prefill.engine.kv_transfer_config={}")


def test_unknown_vllm_argument_suggests_a_valid_argument() -> None:
    from strata.serving.engine.engine import _check_names

    _check_names({"max_model_len": 1})
    with pytest.raises(UserError, match="no argument 'max_model_length': max_model_len or"):
        _check_names({"max_model_length": 1})


def test_benchmark_peers_receive_the_common_arguments() -> None:
    section = recipe_file.load(
        "h200", ["serve.engine={max_model_len: 4096, hf_overrides: {a: 1}}", "serve.decode.engine={seed: 2}"]
    ).serve
    words = engines.flags(engines.kwargs(section, prefix_caching=False))
    assert words[words.index("--max-model-len") + 1] == "4096" and "--seed" not in words
    assert words[words.index("--hf-overrides") + 1] == '{"a": 1}'


def test_step_tokens_below_max_sequences_are_refused() -> None:
    with pytest.raises(recipe_file.RecipeError, match="step_tokens=128 must be at least max_sequences=256"):
        settings("serve.decode.step_tokens=128")


@pytest.mark.parametrize("alone", [("h200", "serve.prefill.replicas=0"), ("laptop", "serve.decode.replicas=1")])
def test_single_pool_and_cpu_engines_have_vllm_defaults(alone: tuple[str, str]) -> None:
    recipe, override = alone
    _, decode = settings(override, recipe=recipe)
    assert "max_num_batched_tokens" not in decode


def test_contiguous_blocks_require_equal_tensor_parallelism() -> None:
    for kwargs in settings():
        assert kwargs["kv_transfer_config"]["kv_connector_module_path"] == WHOLE
    wide = "serve.decode={gpus: 2, tensor_parallel: 2, gpu_memory: 0.4}"
    for kwargs in (*settings(wide), *settings(recipe="laptop")):
        assert kwargs["kv_transfer_config"]["kv_connector_module_path"] == "strata.serving.vllm_patches.side_channel"


def test_engines_that_share_a_gpu_divide_its_memory() -> None:
    sharing = "strata.serving.gpu_sharing.worker.Worker"
    assert [kwargs.get("worker_cls") for kwargs in settings()] == [sharing, sharing]
    whole = "serve.prefill={gpus: 2, tensor_parallel: 2, gpu_memory: 0.9}"
    assert [kwargs.get("worker_cls") for kwargs in settings(whole)] == [None, sharing]
    assert [kwargs.get("worker_cls") for kwargs in settings(recipe="laptop")] == [CPU_WORKER] * 2
    with pytest.raises(recipe_file.RecipeError, match="'worker_cls' is not set here"):
        settings("serve.engine={worker_cls: other.Worker}")


@pytest.mark.parametrize(("can_read", "layout"), [(ANY_LAYOUT, "BHLNC"), (["LBHNC"], "LBHNC"), (["LBHNC", "BLHNC"], "LBHNC")])
def test_block_layout_falls_back_to_a_supported_layout(can_read: list[str], layout: str) -> None:
    """vLLM's own resolver finds the connector's class, and another layout where a backend cannot read this one."""
    pytest.importorskip("vllm")
    from vllm.config import CacheConfig, KVTransferConfig
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    prefill, _ = settings()
    transfer = KVTransferConfig(**prefill["kv_transfer_config"])
    cache, model = CacheConfig(), SimpleNamespace(use_mla=False)
    config = SimpleNamespace(cache_config=cache, kv_transfer_config=transfer, model_config=model)
    assert resolve_kv_cache_layout(config, [can_read]).name == layout
