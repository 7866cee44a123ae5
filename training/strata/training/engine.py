"""Builds a DeepSpeed engine from the recipe's sections, in any parallel layout.

DeepSpeed is imported inside functions: it probes for devices on import, which fails on a driver that has none.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.layout import accumulation
from strata.training.model import balance
from strata.training.model.llama import Head, Layer, Llama
from strata.training.parallel import clipping, data, expert, pipeline, recompute, sequence, tensor
from strata.training.parallel.shard_map import whole_name
from strata.training.patches.adamw import EagerAdamW


def build(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> Any:
    """Builds the engine. Called on every worker, after torch's process group is initialized (gloo on CPUs, NCCL on GPUs)."""
    if parallel.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed uses any GPU that it finds
        torch.set_num_threads(parallel.cpus_per_worker)
    torch.set_float32_matmul_precision(train.matmul)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # Otherwise DeepSpeed compiles its shared-memory collectives here: half a minute, or a crash without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    deepspeed.init_distributed()  # uses torch's process group
    groups = None
    module: Any
    if parallel.pipeline > 1:
        module = pipeline.build(model, train, parallel)
        if parallel.tensor > 1:
            tensor.split_stage(module, module.mpu().get_slice_parallel_group())
    else:
        module = Llama(model, train.seed, train.kernels)
        if parallel.sequence > 1:
            groups = sequence.initialize(parallel.sequence)
            sequence.apply(module, groups)
    selection = recompute.apply(module, train.recompute)

    def optimizer(_: object) -> torch.optim.Optimizer:
        """Called when the module has its final parameters: tensor and expert parallelism replace some of them."""
        named = ((whole_name(name, model, parallel), parameter) for name, parameter in module.named_parameters())
        adamw = torch.optim.AdamW if train.compile else EagerAdamW
        return adamw(parameter_groups(named, train), lr=train.lr, betas=(0.9, 0.95), fused=True)

    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(model, train, parallel),
        mpu=groups,
    )
    clipping.correct(engine, parallel)
    if data.replaces_deepspeed(parallel):
        data.attach(engine)
    if selection and parallel.tensor > 1:
        selection.recompute_reduced(module)
    if model.moe:
        balance.attach(module, model, scale=data.gradient_scale(parallel) / accumulation(train, parallel))
    if train.compile:
        for part in module.modules():
            if isinstance(part, Layer | Head):
                part.compile()
    return engine


def deepspeed_config(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": parallel.zero}
    if parallel.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if parallel.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation(train, parallel),
        "gradient_clipping": train.clip,
        "zero_optimization": zero,
        # torch's fused AdamW also runs on the host; DeepSpeed's CPU optimizer would have to be compiled first
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # DeepSpeed checks for AdamW's exact class; EagerAdamW is a subclass
        "bf16": {"enabled": train.precision == "bf16"},
        "steps_per_print": 10**9,
    }
    # DeepSpeed cannot accumulate in fp32 with ZeRO-1 and sequence parallelism.
    accumulates = accumulation(train, parallel) > 1 and not (parallel.zero == 1 and parallel.sequence > 1)
    if train.precision == "bf16" and parallel.zero and accumulates:
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # a bf16 sum of many small gradients loses the smallest
    if parallel.schedule == "dualpipev":
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}  # DualPipeV sends only whole activations
    if parallel.tensor > 1 and parallel.pipeline == 1:
        config["tensor_parallel"] = tensor.config(parallel.tensor)
    if parallel.expert > 1:
        assert model.moe
        config["expert_parallel"] = expert.config(parallel.expert, model.moe)
    return config


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], train: TrainSection) -> list[dict[str, Any]]:
    """Optimizer groups. Norm weights are scales around one, so they do not decay to zero. An embedding row gets a gradient only
    when its token occurs, so embeddings may take larger steps (`embedding_lr_ratio`) and do not decay either."""
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    tables, norms, matrices = [], [], []
    for name, parameter in named:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tables.append(parameter)
        elif name.endswith("norm.weight"):
            norms.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"name": "matrices", "params": matrices, "weight_decay": train.weight_decay, "ratio": 1.0},
        {"name": "tables", "params": tables, "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
        {"name": "norms", "params": norms, "weight_decay": 0.0, "ratio": 1.0},
    ]
    if any(is_moe_param(parameter) for parameter in matrices):
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return groups


def set_learning_rate(engine: Any, rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["ratio"]
