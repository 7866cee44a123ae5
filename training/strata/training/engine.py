"""Builds a DeepSpeed engine from the recipe's sections, in any parallel layout.

DeepSpeed is imported inside functions: it probes for devices on import, which fails on a driver that has none.
"""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strata.planner.memory.buffers import BUCKET
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.diffusion.model import PictureModel
from strata.training.distillation.objective import DistillationObjective
from strata.training.distillation.teacher import Teacher, section_of
from strata.training.layout import accumulation, has_output, place
from strata.training.model import balance, lora, projections
from strata.training.model.llama import Head, Layer, Llama
from strata.training.parallel import accumulation as gradient_accumulation
from strata.training.parallel import clipping, data, expert, magnitudes, optimizer_state, pipeline, recompute, sequence, tensor
from strata.training.parallel.shard_map import whole_name
from strata.training.parallel.weight_average import WeightAverage
from strata.training.patches.adamw import EagerAdamW
from strata.training.preferences.objective import PreferenceObjective

NO_DECAY = re.compile(r"(norm\w*\.weight|\.bias|\.sinks)$")


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
    preference = PreferenceObjective(train.preference, None) if train.preference else None
    distillation = DistillationObjective(place(dist.get_rank(), parallel).sequence) if train.distill else None
    if parallel.pipeline > 1:
        module = pipeline.build(model, train, parallel, preference or distillation)
        if parallel.tensor > 1:
            tensor.split_stage(module, module.mpu().get_slice_parallel_group())
    else:
        module = _whole(model, train, parallel)
        if parallel.sequence > 1:
            groups = sequence.initialize(parallel.sequence)
            sequence.apply(module, groups)
            if train.preference:
                preference = PreferenceObjective(train.preference, groups.get_sequence_parallel_group())
        if isinstance(module, Llama):
            module.lm_head.objective = preference or distillation
    freeze(module, model, train, parallel)
    if parallel.zero < 3 and parallel.tensor == 1:
        lora.fuse(module)
        projections.fuse(module)
    kind = type(module.transformer.transformer_blocks[0]) if model.picture else Layer
    selection = recompute.apply(module, train.recompute, random=bool(train.lora and train.lora.dropout), kind=kind)

    def optimizer(_: object) -> torch.optim.Optimizer:
        """Called when the module has its final parameters: tensor and expert parallelism replace some of them."""
        if parallel.tensor > 1:
            tensor.finish(module, _tensor_group(module, parallel))
        named = (
            (whole_name(name, model, parallel), parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        )
        adamw = torch.optim.AdamW if train.compile else EagerAdamW
        return adamw(parameter_groups(named, train), lr=train.lr, betas=(0.9, 0.95), fused=True)

    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(model, train, parallel),
        mpu=groups,
    )
    if preference:
        engine.preference = preference
    if distillation:
        engine.distillation = distillation
        if has_output(place(engine.global_rank, parallel), parallel):
            distillation.teacher = Teacher(section_of(model, train), train, engine.device)
    if parallel.zero == 3 and train.lora and train.lora.dora:
        magnitudes.gather_with_projections(module)
    optimizer_state.undo_first_step(engine)
    clipping.correct(engine, parallel)
    gradient_accumulation.attach(engine, parallel)
    if data.replaces_deepspeed(parallel):
        data.attach(engine)
    if selection and parallel.tensor > 1:
        selection.recompute_reduced(module)
    if model.moe:
        balance.attach(module, model, scale=data.gradient_scale(parallel) / accumulation(train, parallel))
    if train.compile:
        for part in module.modules():
            if isinstance(part, kind | Head):
                part.compile()
    if train.flow:
        engine.average = WeightAverage(engine, train.flow.average)
    return engine


def _whole(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> Llama | PictureModel:
    """The whole model on this rank. The weights of an imported one are loaded later, each rank its own: until then they take no
    memory that was not written to, and with ZeRO-3 each rank allocates only its partition."""
    if model.picture:
        return PictureModel(model, train.seed, train.kernels)
    if model.family is None:
        return Llama(model, train.seed, train.kernels, train.lora)
    if parallel.zero == 3 and parallel.tensor == 1 and parallel.expert == 1:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=deepspeed_config(model, train, parallel)):
            return Llama(model, None, train.kernels, train.lora)
    with torch.device("meta"):
        module = Llama(model, None, train.kernels, train.lora)
    module.to_empty(device="cpu")
    module.tie(model)  # `to_empty` allocates a tied weight twice
    return module


def freeze(module: Any, model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    """Excludes parameters from training by the patterns of `train.freeze`. Called by all ranks, as each must train some."""
    if not (train.freeze or train.lora):
        return
    for name, parameter in module.named_parameters():
        if is_frozen(whole_name(name, model, parallel), train):
            parameter.requires_grad_(False)
    idle: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(idle, not any(parameter.requires_grad for parameter in module.parameters()))
    if any(idle):
        where = f"stage {place(idle.index(True), parallel).stage} of the pipeline" if parallel.pipeline > 1 else "the model"
        raise UserError(f"train.freeze={','.join(train.freeze)} leaves nothing of {where} to train.", "Freeze fewer parameters.")
    if parallel.pipeline > 1:
        pipeline.leave_out_frozen_ties(module)


def is_frozen(name: str, train: TrainSection) -> bool:
    """True if a parameter, by its name in the whole model, is not trained."""
    return (train.lora is not None and not lora.is_adapter(name)) or any(fnmatchcase(name, pattern) for pattern in train.freeze)


def _tensor_group(module: Any, parallel: ParallelSection) -> Any:
    if parallel.pipeline > 1:
        return module.mpu().get_slice_parallel_group()
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()


def deepspeed_config(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": parallel.zero, "reduce_bucket_size": int(BUCKET)}
    if parallel.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if parallel.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation(train, parallel),
        "gradient_clipping": train.clip,
        "zero_optimization": zero,
        # torch's fused AdamW also runs on the host; DeepSpeed's CPU optimizer would have to be compiled first
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,  # DeepSpeed checks for AdamW's exact class; EagerAdamW is a subclass
        "bf16": {"enabled": train.precision == "bf16"},
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # waits for the GPU before and after every micro-batch
    }
    # DeepSpeed cannot accumulate in fp32 with ZeRO-1 and sequence parallelism.
    accumulates = accumulation(train, parallel) > 1 and not (parallel.zero == 1 and parallel.sequence > 1)
    if train.precision == "bf16" and parallel.zero and accumulates:
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # a bf16 sum of many small gradients loses the smallest
        config["bf16"]["immediate_grad_update"] = gradient_accumulation.immediate(parallel)
    if parallel.schedule == "dualpipev":
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}  # DualPipeV sends only whole activations
    if parallel.tensor > 1 and parallel.pipeline == 1:
        config["tensor_parallel"] = tensor.config(parallel.tensor, model.picture is not None)
    if parallel.expert > 1:
        assert model.moe
        config["expert_parallel"] = expert.config(parallel.expert, model.moe)
    return config


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], train: TrainSection) -> list[dict[str, Any]]:
    """Optimizer groups. Norm weights, biases, sinks and magnitudes do not decay: zero is no neutral value of them. An embedding
    row gets a gradient only when its token occurs, so embeddings may take larger steps (`embedding_lr_ratio`) and do not decay
    either."""
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    tables, norms, matrices = [], [], []
    for name, parameter in named:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "_embedding.weight")):
            tables.append(parameter)
        elif NO_DECAY.search(name) or lora.is_magnitude(name):
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
