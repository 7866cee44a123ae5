"""vLLM's connector for the tiers of `serve.kv_offload`, alone or beside NIXL. Light: the driver reads it, without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strata.platform.recipe.kv_offload import KvOffloadSection

GIB = 1 << 30
DISK = "DiskTier"
FOUND_TOKENS = "vllm:kv_offload_found_tokens"  # counter of `found_tokens.py`


@dataclass(frozen=True)
class KvOffload:
    cpu_bytes: int
    folder: str | None  # of the disk tier
    disk_bytes: int

    @staticmethod
    def of(section: KvOffloadSection | None) -> "KvOffload | None":
        if section is None:
            return None
        return KvOffload(int(section.cpu_gib * GIB), section.disk, int((section.disk_gib or 0) * GIB))

    def connector(self, weights: Sequence[str], identity: dict[str, Any], whole_blocks: bool) -> dict[str, Any]:
        """vLLM's `kv_transfer_config`. `weights` are folders, and `identity` are settings, which decide a block's content."""
        tiers = []
        if self.folder is not None:
            place = {"folder": self.folder, "capacity": self.disk_bytes}
            tiers.append(
                {"type": DISK, "module_path": "strata.serving.kv_offload.disk_tier", "weights": list(weights)}
                | place
                | {"identity": identity}
            )
        transfer: dict[str, Any] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "TieredSpec",
                "spec_module_path": "strata.serving.kv_offload.tiered_spec",
                "cpu_bytes_to_use": self.cpu_bytes,
                # vLLM's default leaves answers out, which the next turn of a conversation repeats.
                "offload_prompt_only": False,
                "secondary_tiers": tiers,
            },
        }
        if whole_blocks:
            transfer["kv_connector_module_path"] = "strata.serving.kv_offload.whole_blocks"
        return transfer


def beside(nixl: dict[str, Any], offload: dict[str, Any]) -> dict[str, Any]:
    """Both connectors in one engine. vLLM loads a request's blocks from the first that has any: a prompt that was prefilled
    remotely is read by NIXL, and every other one is looked up in the tiers. Both save."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": nixl["kv_load_failure_policy"],  # vLLM reads that of the outer connector only
        "kv_connector_extra_config": {"connectors": [nixl, offload]},
    } | ({"kv_buffer_device": nixl["kv_buffer_device"]} if "kv_buffer_device" in nixl else {})
