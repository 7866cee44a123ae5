"""Section of the deployment."""

from pydantic import Field

from strata.platform.recipe.section import Positive, Section


class DeploySection(Section):
    """Kubernetes deployment by `strata deploy`. A laptop needs none of it."""

    name: str = Field("strata", description="name of the endpoint; the job is <name>-train, the interactive cluster <name>-lab")
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
