"""KV cache layout that the NIXL connector requests from vLLM."""

from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.v1.attention.backends.utils import KVCacheLayout

from strata.serving.vllm_patches.nixl_layout import BLOCK_HEAD_LAYER, NixlConnector


def config(use_mla: bool) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))


def test_the_layers_are_inside_a_block() -> None:
    assert NixlConnector.get_required_kvcache_layout(config(use_mla=False)) == BLOCK_HEAD_LAYER
    assert KVCacheLayout[BLOCK_HEAD_LAYER], "vLLM no longer has this layout: review nixl_layout.py"


def test_mla_models_have_the_layout_of_vllm() -> None:
    assert NixlConnector.get_required_kvcache_layout(config(use_mla=True)) is None


def test_vllm_still_needs_it() -> None:
    layout = NixlPullConnector.get_required_kvcache_layout(config(use_mla=False))
    assert layout == "LBHNC", (
        f"vLLM's NIXL connector now requests the layout {layout}, not LBHNC. If it has the layers (L) inside a block (B), remove "
        "nixl_layout.py; otherwise review it."
    )
