"""Offloading connector for a KV cache whose blocks hold all layers.

vLLM's offloading connector asks for a layout layer by layer, and `nixl_layout.py` for one with the layers inside a block. vLLM
refuses connectors that disagree. The offloading connector can copy whole blocks, so it accepts NIXL's choice here.

Written for vLLM 0.29. No longer needed when vLLM's offloading connector has no layout of its own; the test of this file fails
then.
"""

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector


class OffloadingConnector(offloading_connector.OffloadingConnector):  # type: ignore[misc]
    """Has vLLM's class name, by which vLLM finds the statistics of a connector among several."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return None
