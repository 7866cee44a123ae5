"""Settings of a picture replica as plain data: created in the driver, read in a replica and its workers. No torch here."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.platform.recipe import Device, PictureServingSection, ServeSection
from strata.serving.spec import GatewaySpec, Network


@dataclass(frozen=True)
class PicturesSpec:
    model_id: str
    folder: str
    device: Device
    dtype: str  # of torch
    compiled: bool
    threads: int  # of a worker
    section: PictureServingSection
    network: Network

    @staticmethod
    def of(serve: ServeSection, folder: Path, model_id: str, network: Network) -> "PicturesSpec":
        section = serve.pictures
        return PicturesSpec(
            model_id=model_id,
            folder=str(folder.resolve()),
            device=serve.device,
            dtype=_dtype(serve),
            compiled=serve.device == "gpu" and not serve.eager,
            threads=max(1, (os.cpu_count() or 1) // (section.replicas * section.workers)),
            section=section,
            network=network,
        )

    @property
    def layout(self) -> PictureLayout:
        return layout(self.section)

    def resources(self) -> dict[str, Any]:
        """Ray resources of one replica. The replica owns the GPUs, and its workers inherit them."""
        gpus = {"num_gpus": self.section.workers} if self.device == "gpu" else {}
        return {"num_cpus": self.section.workers} | gpus

    def environment(self) -> dict[str, str]:
        threads = str(self.threads)
        return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def layout(section: PictureServingSection) -> PictureLayout:
    return PictureLayout(section.ulysses, section.ring, section.cfg, section.pipefusion, section.patches)


def _dtype(serve: ServeSection) -> str:
    if serve.dtype != "auto":
        return serve.dtype
    return "bfloat16" if serve.device == "gpu" else "float32"


def gateway(serve: ServeSection, model_id: str, network: Network, keys_file: str | None) -> GatewaySpec:
    """A gateway for pictures; its capacity is in pictures."""
    return GatewaySpec(
        model_id=model_id,
        names=(model_id,),
        host=serve.host,
        port=serve.port,
        gateways=serve.gateways,
        decode_replicas=serve.pictures.replicas,
        max_sequences=serve.pictures.max_batch,
        max_queue=serve.pictures.max_queue,
        disaggregated=False,
        network=network,
        keys_file=keys_file,
        warm_up=True,
        role="pictures",
    )
