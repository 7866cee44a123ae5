"""Section of KV cache tiers beyond an engine's own memory."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from strata.platform.recipe.section import Section

Gib = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KvOffloadSection(Section):
    """Tiers for KV blocks that no longer fit into an engine's KV cache."""

    cpu_gib: Gib = Field(4.0, description="host memory of each engine for KV blocks, in GiB")
    disk: Annotated[str, Field(pattern="^/")] | None = Field(
        None, description="folder for KV blocks (absolute path), shared by the engines of a node; unset: no disk tier"
    )
    disk_gib: Gib | None = Field(None, description="KV blocks in the folder, in GiB; the least recently used are deleted")

    @model_validator(mode="after")
    def disk_is_bounded(self) -> Self:
        if self.disk is not None and self.disk_gib is None:
            raise ValueError(f"disk={self.disk} needs disk_gib, the limit of its size")
        if self.disk is None and self.disk_gib is not None:
            raise ValueError(f"disk_gib={self.disk_gib} needs disk, a folder")
        return self
