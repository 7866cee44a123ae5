"""`serve.prefill.replicas=0`: prefill and decode on the same engines. `test_examples.py` serves with real ones."""

from pathlib import Path

import pytest
from ray import serve as ray_serve

from strata.platform import recipe_file
from strata.platform.recipe import ServeSection
from strata.serving.runtime import app
from strata.serving.spec import EngineSpec, GatewaySpec, Network

NETWORK = Network.within(one_machine=True)
AGGREGATED = "serve.prefill.replicas=0"


def section(recipe: str, *overrides: str) -> ServeSection:
    return recipe_file.load(recipe, list(overrides)).serve


def engine(role: str, chosen: ServeSection) -> EngineSpec:
    return EngineSpec.of(role, chosen, Path("/model"), "tiny", NETWORK)  # type: ignore[arg-type]


def deployments(chosen: ServeSection) -> dict[str, ray_serve.Deployment]:
    gateway = GatewaySpec.of(chosen, "tiny", NETWORK)
    ingress = app.build(gateway, engine("prefill", chosen), engine("decode", chosen))._bound_deployment
    bound = [ingress, *(one._bound_deployment for one in ingress.init_args[1:])]
    return {one.name: one for one in bound}


@pytest.mark.parametrize("recipe", ["laptop", "h200"])
def test_application_has_no_prefill_deployment(recipe: str) -> None:
    assert deployments(section(recipe)).keys() == {"gateway", "decode", "prefill"}
    found = deployments(section(recipe, AGGREGATED, "serve.decode.replicas=3"))
    assert found.keys() == {"gateway", "decode"}
    assert found["decode"].num_replicas == 3
    assert found["gateway"].init_args[0].disaggregated is False, "gateways look for no prefill replica"


@pytest.mark.parametrize("recipe", ["laptop", "h200"])
def test_engine_has_no_kv_transfer(recipe: str) -> None:
    pair = engine("decode", section(recipe)).engine_kwargs()
    alone = engine("decode", section(recipe, AGGREGATED)).engine_kwargs()
    assert "kv_transfer_config" in pair and "kv_transfer_config" not in alone
    assert ("block_size" in alone) == (recipe == "laptop"), "only blocks of GPUs are larger because they are transferred"


def test_steps_are_vllms_default_unless_set() -> None:
    assert "max_num_batched_tokens" not in engine("decode", section("h200", AGGREGATED, "serve.kernels=vllm")).engine_kwargs()
    small = section("h200", AGGREGATED, "serve.kernels=strata", "serve.decode.step_tokens=512")
    kwargs = engine("decode", small).engine_kwargs()
    assert kwargs["max_num_batched_tokens"] == 512
    assert kwargs["compilation_config"] == {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}


def test_engine_has_all_cpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert engine("decode", section("laptop")).threads == 4
    assert engine("decode", section("laptop", AGGREGATED)).threads == 8


def test_capacity_is_that_of_the_decode_replicas() -> None:
    gateway = GatewaySpec.of(section("laptop", AGGREGATED, "serve.max_sequences=8", "serve.max_queue=4"), "tiny", NETWORK)
    assert gateway.capacity(1) == 12 and gateway.capacity(2) == 20


def test_pool_without_replicas_cannot_scale_up() -> None:
    with pytest.raises(recipe_file.RecipeError, match=r"prefill\.max_replicas=2 is unused"):
        section("laptop", AGGREGATED, "serve.prefill.max_replicas=2")
    with pytest.raises(recipe_file.RecipeError):
        section("laptop", "serve.decode.replicas=0")
