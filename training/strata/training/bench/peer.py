"""Process of a benchmark contender: `python -m strata.training.bench.peer JOB`, with torch's usual RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from strata.training.bench import bare, models
from strata.training.bench.contest import Job
from strata.training.bench.finetuning import models as finetuning_models
from strata.training.bench.ours import loop_job, run_ours_without_ray
from strata.training.loop import training_data
from strata.training.metrics import records
from strata.training.metrics.records import Record


def main() -> None:
    job = Job.model_validate_json(sys.argv[1])
    recipe = job.recipe
    device = torch.device("cpu")
    if recipe.parallel.device == "gpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(recipe.parallel.cpus_per_worker)
    torch.set_float32_matmul_precision(recipe.train.matmul)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)

    def report(record: Record) -> None:
        if dist.get_rank() == 0:
            records.append(job.metrics, record)

    try:
        match job.contender:
            case "ours" | "ours_torch" | "ours_liger":
                run_ours_without_ray(job, report)
            case "bare" | "liger" | "liger_compiled":
                bare.train(_model(job, device), job, training_data(loop_job(job)), device, report)
    finally:
        dist.destroy_process_group()


def _model(job: Job, device: torch.device) -> nn.Module:
    recipe, compiled = job.recipe, job.contender == "liger_compiled"
    if recipe.model.family:
        return finetuning_models.hugging_face(recipe, device, job.contender != "bare", compiled)
    return models.bare(recipe, device) if job.contender == "bare" else models.liger(recipe, device, compiled)


if __name__ == "__main__":
    main()
    # Skips interpreter shutdown, in which one process in ten aborts because a library left a C++ thread running.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
