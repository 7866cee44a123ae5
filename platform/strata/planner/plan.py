"""The plan of one training layout: memory, step, failures and a token budget's cost, on one worksheet."""

from dataclasses import dataclass, replace

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.checks import check
from strata.planner.layout import Layout
from strata.planner.memory.activations import keeping_of
from strata.planner.memory.plan import MemoryPlan, plan_memory
from strata.planner.memory.tuning import Tuning
from strata.planner.reliability.budget import Budget, plan_budget
from strata.planner.reliability.failures import FailurePlan, plan_failures
from strata.planner.step.step import Step, plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.hardware.specs import Fabric, Gpu

# Llama 3's store sustained 2 TB/s for 16,384 GPUs (arXiv 2407.21783, section 3.3.1).
STORAGE_PER_GPU = 2e12 / 16384


@dataclass(frozen=True)
class TrainingPlan:
    shape: Shape
    layout: Layout
    sequence: int
    gpu: Gpu
    fabric: Fabric
    software: Software
    memory: MemoryPlan
    step: Step
    failures: FailurePlan
    budget: Budget | None
    worksheet: Worksheet


def plan_training(
    shape: Shape,
    layout: Layout,
    sequence: int,
    gpu: Gpu,
    fabric: Fabric,
    software: Software,
    tokens: float | None = None,
    storage: float | None = None,
    tuning: Tuning | None = None,
) -> TrainingPlan:
    """`tokens`: a budget to work out days and money for. `storage`: bytes a second of the checkpoints' store. `tuning`: the part
    of the model that is trained, if not all of it."""
    check(shape, layout, sequence, gpu)
    worksheet = Worksheet(f"{shape.name} on {layout.gpus} {gpu.name}")
    keeping = replace(keeping_of(software), tuning=tuning)
    memory = plan_memory(shape, layout, gpu.memory, keeping, worksheet.part("memory of a GPU"), sequence)
    step = plan_step(shape, layout, gpu, fabric, software, worksheet, sequence)
    found = plan_failures(
        layout.gpus,
        state_bytes(shape, layout.precision),
        step.seconds,
        usual_storage(layout.gpus) if storage is None else storage,
        worksheet=worksheet,
        dollars_per_gpu_hour=gpu.dollars_per_hour,
    )
    budget = None
    if tokens is not None:
        budget = plan_budget(tokens, step.tokens_per_s, layout.gpus, gpu.dollars_per_hour, gpu.watts, found.goodput, worksheet)
    return TrainingPlan(shape, layout, sequence, gpu, fabric, software, memory, step, found, budget, worksheet)


def state_bytes(shape: Shape, precision: str) -> float:
    """Bytes of a checkpoint: a weight in fp32 with two moments, and in mixed precision the weight in 16 bits too."""
    return shape.parameters() * (12.0 if precision == "fp32" else 14.0)


def usual_storage(gpus: int) -> float:
    return gpus * STORAGE_PER_GPU
