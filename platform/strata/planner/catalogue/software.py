"""Training programs, by the differences that decide a step's time and memory.

After 2022, programs alone made the same step on the same GPUs a third faster, so a plan names its program.
"""

from dataclasses import dataclass, replace
from typing import Literal

from strata.planner.errors import choose


@dataclass(frozen=True)
class Software:
    """Training program.

    `unfused` attention writes its scores to memory; `flash` does not, and skips masked scores. `overlaps_*`: whether
    communication of that dimension overlaps with compute. `gradient_bytes`: bytes per gradient that data-parallel ranks send.
    `selective`: work repeated by selective recompute: the attention core, all but the matrix products, or half of those too.
    `fused_loss`: the gradient of the logits is computed some rows at a time, so they are never complete in memory.
    """

    name: str
    attention: Literal["unfused", "flash"]
    dropout: bool
    gradient_bytes: int
    overlaps_data: bool
    overlaps_tensor: bool
    selective: Literal["core", "streams", "half"]
    why: str
    fused_loss: bool = False


STRATA = Software(
    name="strata",
    attention="flash",
    dropout=False,
    gradient_bytes=2,
    overlaps_data=True,
    overlaps_tensor=False,
    selective="streams",
    why="strata train: DeepSpeed, compiled by layer, with our kernels",
    fused_loss=True,
)

PROGRAMS = {
    software.name: software
    for software in (
        Software(
            name="megatron-2021",
            attention="unfused",
            dropout=True,
            gradient_bytes=2,
            overlaps_data=False,
            overlaps_tensor=False,
            selective="core",
            why="Megatron-LM as in arXiv 2104.04473: fp16, fused softmax and GeLU, nothing overlapped",
        ),
        Software(
            name="megatron-2022",
            attention="unfused",
            dropout=True,
            gradient_bytes=2,
            overlaps_data=False,
            overlaps_tensor=False,
            selective="core",
            why="Megatron-LM as in arXiv 2205.05198, which adds sequence parallelism and selective recompute",
        ),
        Software(
            name="megatron-core",
            attention="flash",
            dropout=False,
            gradient_bytes=2,
            overlaps_data=True,
            overlaps_tensor=True,
            selective="core",
            why="Megatron-Core of 2024 with --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap; gradients in bf16"
            " as in NVIDIA's performance recipes",
        ),
        Software(
            name="torch-fsdp",
            attention="flash",
            dropout=False,
            gradient_bytes=4,
            overlaps_data=True,
            overlaps_tensor=False,
            selective="half",
            why="torch's FSDP as torchtitan uses it: compiled, gradients reduced in fp32, every other product recomputed",
        ),
        STRATA,
        replace(STRATA, name="strata-torch", why="the same with train.kernels=torch", fused_loss=False),
        replace(STRATA, name="strata-eager", why="with train.kernels=torch and train.compile=false", fused_loss=False),
    )
}


def program(name: str) -> Software:
    return choose("program", name, PROGRAMS)
