"""Section of the deployment."""

from typing import Literal

from pydantic import Field

from strata.platform.recipe.section import NonNegative, Positive, Section


class DeploySection(Section):
    """Kubernetes deployment by `strata deploy`. A laptop needs none of it."""

    name: str = Field("strata", description="name of the endpoint; a job is <name>-<run>, the interactive cluster <name>-lab")
    namespace: str = Field("strata", description="namespace of the team: its runs, storage, service accounts and queue")
    image: str | None = Field(None, description="container image, with an immutable tag or digest")
    storage: str | None = Field(None, description="storage behind /mnt/strata: a bucket on GKE, a NAS mount target on ACK")
    model: str | None = Field(
        None,
        description="model to serve: a run, a folder in /mnt/strata, a bucket's URI or a Hugging Face id; unset: that of --run",
    )
    model_cache_gib: Positive = Field(200, description="volume of a pod for its copy of a model from a bucket or Hugging Face")
    gpu: str | None = Field(None, description="GPU type, such as h100")
    prefill_gpu: str | None = Field(None, description="GPU type of the prefill pool, if different")
    decode_gpu: str | None = Field(None, description="GPU type of the decode pool, if different")
    gpus_per_node: Positive | None = Field(None, description="GPUs of a node; unset: those of the largest machine with this GPU")
    nodes: Positive | None = Field(None, description="available nodes of each GPU type; unset: as many as training needs")
    cpus: Positive | None = Field(None, description="CPUs of a worker pod; unset: its GPUs' share of the node")
    memory_gib: Positive | None = Field(None, description="memory of a worker pod, in GiB; unset: its GPUs' share of the node")
    reservation: str | None = Field(None, description="Compute Engine reservation, for the component reservation")
    quota_gpus: Positive | None = Field(
        None, description="GPUs guaranteed to the team by Kueue; unset: a queue per run, with the GPUs of its pods"
    )
    borrow_gpus: NonNegative | None = Field(
        None, description="GPUs that the team may borrow from other teams' idle quota; unset: no limit"
    )
    priority: Literal["low", "normal", "high"] = Field(
        "normal", description="Kueue priority of training and the lab; a higher one preempts lower ones of the same team"
    )
    network: Literal["tcp"] | None = Field(None, description="tcp: allow training on several GPU nodes without a fast network")
    rdma_resource: str | None = Field(None, description="resource of the RDMA device plugin; unset: the component's")
