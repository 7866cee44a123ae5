"""NIXL connector with a KV cache layout that transfers a block in one descriptor.

vLLM's default layout stores the cache layer by layer, so a block is transferred in as many descriptors as the model has layers.
The decode engine posts them between two steps while all its streams wait: 8,192 tokens of 16 layers, in blocks of 128 tokens,
are 1,024 descriptors and 5 ms on an H200. With the layers inside a block the same prompt needs 64 descriptors and less than
1 ms (`strata bench transfer`).

The layout is a preference: if an attention backend does not support it, as on CPUs, vLLM logs this and uses another.

Written for vLLM 0.29. No longer needed when vLLM's NIXL connector requests a layout with the layers inside a block; the test of
this file fails then.
"""

from vllm.config import VllmConfig

from strata.serving.vllm_patches import side_channel

BLOCK_HEAD_LAYER = "BHLNC"  # vLLM's name: block, head, layer, token, content (key and value)


class NixlConnector(side_channel.NixlConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return BLOCK_HEAD_LAYER if super().get_required_kvcache_layout(vllm_config) else None
