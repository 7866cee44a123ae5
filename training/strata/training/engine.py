"""The model in DeepSpeed: sections of the recipe to an engine that can take steps.

DeepSpeed is imported inside functions: it probes for devices on import, which fails on a driver that has none.
"""

import os
from typing import Any

import torch
from torch import nn

from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.model import Llama


def build(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> Any:
    """Called on every worker, after Ray Train has set up torch's process group (gloo on CPUs, nccl on GPUs)."""
    if parallel.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed takes a GPU it finds
        torch.set_num_threads(parallel.cpus_per_worker)
    torch.set_float32_matmul_precision(train.matmul)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # DeepSpeed would compile its shared-memory collectives now: half a minute, or a crash where there is no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    torch.manual_seed(train.seed)
    llama = Llama(model)
    optimizer = torch.optim.AdamW(parameter_groups(llama, train), lr=train.lr, betas=(0.9, 0.95), fused=True)
    engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=deepspeed_config(train, parallel))
    return engine


def deepspeed_config(train: TrainSection, parallel: ParallelSection) -> dict[str, Any]:
    return {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation(train, parallel),
        "gradient_clipping": train.clip,
        "zero_optimization": {"stage": parallel.zero},
        "bf16": {"enabled": train.precision == "bf16"},
        "steps_per_print": 10**9,
    }


def accumulation(train: TrainSection, parallel: ParallelSection) -> int:
    return train.batch // (parallel.workers * train.micro_batch)


def parameter_groups(model: nn.Module, train: TrainSection) -> list[dict[str, Any]]:
    """Norm weights are scales around one: decay would pull them to zero. An embedding's row is trained only when its token
    comes by, so it may take larger steps and is not decayed either."""
    named = list(model.named_parameters())
    tables = [p for name, p in named if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    norms = [p for _, p in named if p.dim() < 2]
    matrices = [p for name, p in named if p.dim() >= 2 and "layers" in name]
    return [
        {"params": matrices, "weight_decay": train.weight_decay, "ratio": 1.0},
        {"params": tables, "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
        {"params": norms, "weight_decay": 0.0, "ratio": 1.0},
    ]


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["ratio"]
