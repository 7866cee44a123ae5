"""`serve.kernels`: engines that use Strata's kernels, and where it is refused."""

from pathlib import Path
from typing import Any

import pytest

from strata.kernels import vllm_plugin
from strata.platform import recipe_file
from strata.serving.bench.contenders import engines
from strata.serving.spec import EngineSpec, Network, Role

ROLES: tuple[Role, ...] = ("prefill", "decode")


def specs(*overrides: str) -> list[EngineSpec]:
    section, network = recipe_file.load("h200", list(overrides)).serve, Network.within(one_machine=True)
    return [EngineSpec.of(role, section, Path("/model"), "m", network) for role in ROLES]


def test_both_pools_use_the_same_kernels() -> None:
    for spec in specs():
        assert spec.environment()[vllm_plugin.SWITCH] == ",".join(vllm_plugin.SERVED)
        assert spec.engine_kwargs()["attention_backend"] == vllm_plugin.engine_arguments()["attention_backend"]
    for spec in specs("serve.kernels=vllm"):
        assert vllm_plugin.SWITCH not in spec.environment()
        assert "attention_backend" not in spec.engine_kwargs()


def test_benchmark_peers_use_vllm_kernels() -> None:
    section = recipe_file.load("h200", []).serve
    settings: dict[str, Any] = engines.kwargs(section, prefix_caching=False)
    assert "attention_backend" not in settings and vllm_plugin.SWITCH not in engines.environment(section, engines=1)


def test_strata_kernels_are_refused_on_a_cpu() -> None:
    with pytest.raises(
        recipe_file.RecipeError, match=r"kernels=strata are Triton kernels for NVIDIA GPUs: .*kernels=vllm on a CPU"
    ):
        recipe_file.load("laptop", ["serve.kernels=strata"])
