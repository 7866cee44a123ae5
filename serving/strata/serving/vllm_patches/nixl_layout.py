"""Blocks that travel whole.

vLLM keeps its cache layer by layer, so a block is handed over in as many pieces as the model has layers. Each is a copy of its
own, which the decode engine posts between two steps while all its streams wait: 8,192 tokens of 16 layers, in blocks of 128
tokens, are 1,024 pieces and 5 ms on an H200. With the layers inside a block it is one piece, 64 for the same prompt, and less
than 1 ms (`strata bench transfer`).

The layout is a wish: where an attention backend cannot read it, as on CPUs, vLLM says so and takes another.
"""

from vllm.config import VllmConfig

from strata.serving.vllm_patches import side_channel

BLOCK_HEAD_LAYER = "BHLNC"  # vLLM's name: blocks, heads, layers, tokens, and a token's key and value


class NixlConnector(side_channel.NixlConnector):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return BLOCK_HEAD_LAYER if super().get_required_kvcache_layout(vllm_config) else None
