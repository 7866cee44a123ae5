"""Connectors of an engine with tiers, as vLLM's own classes read them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from strata.platform import recipe_file
from strata.serving.kv_offload import whole_blocks
from strata.serving.kv_offload.disk_tier import DiskTier
from strata.serving.kv_offload.settings import FOUND_TOKENS
from strata.serving.kv_offload.tiered_spec import TieredSpec
from strata.serving.spec import EngineSpec, Network, Role
from strata.serving.vllm_patches import nixl_layout, side_channel

TIERS = "serve.kv_offload={cpu_gib: 2, disk: /kv, disk_gib: 3}"
ROLES: tuple[Role, ...] = ("prefill", "decode")


def transfer(role: Role, *words: str, recipe: str = "laptop") -> dict[str, Any] | None:
    section = recipe_file.load(recipe, list(words)).serve
    spec = EngineSpec.of(role, section, Path("/model"), "m", Network.within(one_machine=True))
    found: dict[str, Any] | None = spec.engine_kwargs().get("kv_transfer_config")
    return found


def test_engine_without_a_prefill_pool_has_tiers_alone() -> None:
    assert transfer("decode", "serve.prefill.replicas=0") is None
    tree = transfer("decode", "serve.prefill.replicas=0", TIERS)
    assert tree is not None
    config = KVTransferConfig(**tree)
    assert KVConnectorFactory.get_connector_class(config) is OffloadingConnector
    extra = config.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] == 2 << 30 and extra["offload_prompt_only"] is False
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieredSpec
    (disk,) = extra["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(disk) is DiskTier
    assert (disk["folder"], disk["capacity"], disk["weights"]) == ("/kv", 3 << 30, ["/model", "/model"])
    assert FOUND_TOKENS in TieredSpec.build_metric_definitions(extra)


def test_host_memory_alone() -> None:
    tree = transfer("decode", "serve.prefill.replicas=0", "serve.kv_offload={}")
    assert tree is not None and tree["kv_connector_extra_config"]["secondary_tiers"] == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", ["laptop", "h200"])
def test_engines_of_a_pair_have_both_connectors(role: Role, recipe: str) -> None:
    alone, both = transfer(role, recipe=recipe), transfer(role, TIERS, recipe=recipe)
    assert alone is not None and both is not None
    config = KVTransferConfig(**both)
    assert KVConnectorFactory.get_connector_class(config) is MultiConnector and KVConnectorFactory.supports_hma_config(config)
    nixl, tiers = both["kv_connector_extra_config"]["connectors"]
    assert nixl == alone, "NIXL first: a prompt that was prefilled remotely is read from there"
    assert config.has_connector("NixlConnector") and both["kv_load_failure_policy"] == "recompute"
    children = [KVConnectorFactory.get_connector_class(KVTransferConfig(**child)) for child in (nixl, tiers)]
    on_gpu = recipe == "h200"
    assert children == [
        (nixl_layout if on_gpu else side_channel).NixlConnector,
        whole_blocks.OffloadingConnector if on_gpu else OffloadingConnector,
    ]


@pytest.mark.parametrize(("recipe", "layout"), [("laptop", "LBHNC"), ("h200", "BHLNC")])
def test_connectors_agree_on_a_layout(recipe: str, layout: str) -> None:
    model = SimpleNamespace(use_mla=False)
    config = SimpleNamespace(
        model_config=model, kv_transfer_config=KVTransferConfig(**(transfer("decode", TIERS, recipe=recipe) or {}))
    )
    assert MultiConnector.get_required_kvcache_layout(config) == layout


def test_vllm_still_needs_another_layout() -> None:
    layout = OffloadingConnector.get_required_kvcache_layout(SimpleNamespace())
    assert layout == "LBHNC", f"vLLM's offloading connector now requests the layout {layout}: review whole_blocks.py"
    assert whole_blocks.OffloadingConnector.__name__ == OffloadingConnector.__name__
