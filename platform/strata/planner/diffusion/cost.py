"""Time and memory of sampling one batch with a diffusion transformer in one layout.

A block is matrix products at the tensor cores' rate, attention at the rate of its kernel, and the rest at the memory's rate. The
rates are those of the training planner. Communication that nothing hides is added:

- Ulysses: two all-to-alls per block, one of queries, keys and values, one of the output;
- ring: keys and values are sent on while a part of the attention is computed, so only what takes longer than that part counts;
- CFG: an all-gather of the prediction per step;
- PipeFusion: patches are sent on while the next one is computed; the first steps are exact and go through the stages in sequence.

Text encoders and the autoencoder count for memory, not for time.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from strata.planner.collectives.cost import links
from strata.planner.diffusion.catalogue import PictureShape, Request
from strata.planner.diffusion.layout_rules import WARM_UP, PictureLayout, check
from strata.planner.step.communication import Ground
from strata.planner.step.compute import FLASH_FORWARD, LAUNCH_S, STREAMED
from strata.planner.step.tiles import filled
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu

AttentionKernel = Literal["flash-2", "flash-3"]
WIDTH = 2  # bytes of a value in bf16
# FlashAttention-2 does not use Hopper's wgmma and TMA: it reaches 35% of an H100's 989 TFLOP/s (arXiv 2407.08608, abstract).
# Where the tensor cores are slower than that, as an H20's, they are the limit again: this rule was settled with the figures of
# `strata plan dit --validate` in view. Strata's kernel and cuDNN count as flash-3.
FLASH_2_HOPPER = 0.35 * 989.4e12
HOPPER = ("h100", "h200", "h800", "h20")
# Values of one hidden size that the kernels between the products of a block read and write per token, compiled: norm and
# modulation 2, norm and rotation of queries and keys 4, gate and residual 3, norm and modulation 2, activation 8, gate and
# residual 3. Cross attention adds its residual, 3.
STREAM = 22
CROSS_STREAM = 3
# Kernels of a block, per stream: the products above, attention and what is between them.
KERNELS, CROSS_KERNELS = 12, 5
# A ring merges the output of each further part into the sum, which is fp32: read it and the part, write it.
MERGE, MERGE_KERNELS = 5, 2
RUNTIME_BYTES = 1.5e9  # CUDA context, communication buffers, as in the serving planner
LIVE = 16  # values of one hidden size per token that are in memory at the same time in the widest block


@dataclass(frozen=True)
class Parts:
    """Seconds of a step on one GPU."""

    products: float
    attention: float
    memory: float
    launch: float
    communication: float

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.memory + self.launch

    @property
    def total(self) -> float:
        return self.compute + self.communication

    @property
    def bound(self) -> str:
        """Name of the largest part."""
        names = {
            "matrix products": self.products,
            "attention": self.attention,
            "memory bandwidth": self.memory,
            "kernel launches": self.launch,
            "communication": self.communication,
        }
        return max(names, key=lambda name: names[name])


@dataclass(frozen=True)
class SamplingPlan:
    """Prediction for one layout. `step_s` is a step after the warm-up. `efficiency` is the speedup over one GPU divided by the
    number of GPUs, `fits` whether `memory` is within the GPU's."""

    layout: PictureLayout
    gpus: int
    step_s: float
    latency_s: float
    pictures_per_s: float
    efficiency: float
    memory: float
    fits: bool
    parts: Parts
    bound: str


def plan_sampling(
    shape: PictureShape,
    request: Request,
    layout: PictureLayout,
    gpu: Gpu,
    fabric: Fabric,
    attention: AttentionKernel = "flash-3",
    warm_up: int = WARM_UP,
) -> SamplingPlan:
    request.check()
    check(layout, request.splittable(shape))
    model = _Model(shape, request, layout, gpu, fabric, attention)
    latency, parts = model.latency(warm_up)
    alone = _Model(shape, request, PictureLayout(), gpu, fabric, attention).latency(warm_up)[0]
    memory = model.memory()
    bound = parts.bound
    if layout.pipefusion > 1 and latency - request.steps * parts.total > parts.total * request.steps / 2:
        bound = "exact warm-up steps"
    return SamplingPlan(
        layout=layout,
        gpus=layout.workers,
        step_s=parts.total,
        latency_s=latency,
        pictures_per_s=request.batch / latency,
        efficiency=alone / latency / layout.workers,
        memory=memory,
        fits=memory <= gpu.memory,
        parts=parts,
        bound=bound,
    )


def attention_rate(gpu: Gpu, kernel: AttentionKernel) -> float:
    """FLOP/s of attention's forward pass."""
    rate = _peak(gpu) * FLASH_FORWARD
    return min(rate, FLASH_2_HOPPER) if kernel == "flash-2" and gpu.name.startswith(HOPPER) else rate


def _peak(gpu: Gpu) -> float:
    peak = gpu.flops.get("bf16") or gpu.flops.get("fp16")
    if peak is None:
        raise UserError(f"{gpu.name} computes neither in bf16 nor in fp16.", "Use another GPU.")
    return peak


class _Model:
    """The terms of one layout."""

    def __init__(
        self,
        shape: PictureShape,
        request: Request,
        layout: PictureLayout,
        gpu: Gpu,
        fabric: Fabric,
        attention: AttentionKernel,
    ) -> None:
        self.shape, self.request, self.layout, self.gpu = shape, request, layout, gpu
        self.matrix_rate = _peak(gpu) * gpu.reachable * gpu.sustained
        self.attention_rate = attention_rate(gpu, attention)
        self.memory_rate = gpu.bandwidth * STREAMED
        self.ground = Ground(gpu.domain, layout.workers, links(gpu, fabric, launch=0.0))
        self.rows = request.batch * ceil(request.passes(shape) / layout.cfg)

    def latency(self, warm_up: int) -> tuple[float, Parts]:
        """Seconds of all steps, and the parts of a step after the warm-up."""
        stages, patches, steps = self.layout.pipefusion, self.layout.pipeline_patches, self.request.steps
        parts = self.step(self.layout.sequence, patches, stages)
        if stages == 1:
            return steps * parts.total, parts
        exact = self.step(1, 1, 1)
        size = self.rows * (self.request.tokens + self.shape.joint_text) * self.shape.hidden * WIDTH
        whole = self._send("pipeline", size, stages, 1)
        warm = min(warm_up, steps)
        fill = (stages - 1) * parts.total / patches if steps > warm else 0.0
        return warm * (exact.compute + (stages - 1) * whole + self.guidance()) + (steps - warm) * parts.total + fill, parts

    def step(self, sequence: int, patches: int, stages: int) -> Parts:
        """One step with the tokens split over `sequence` GPUs, in `patches`, of a model whose blocks are split over `stages`.
        The stages work at the same time, so the slowest one, with the most blocks, counts."""
        shape, request = self.shape, self.request
        image, text = ceil(request.tokens / sequence / patches), ceil(shape.joint_text / sequence / patches)
        share = patches * ceil(shape.blocks / stages) / shape.blocks
        kinds = ((shape.double_blocks, "double"), (shape.single_blocks, "single"), (shape.plain_blocks, "plain"))
        products = sum(count * self._products(kind, image, text) for count, kind in kinds)
        streams = shape.double_blocks * 2 + shape.single_blocks + shape.plain_blocks
        merges = shape.blocks * (self.layout.ring - 1) if sequence > 1 else 0
        kernels = streams * KERNELS + merges * MERGE_KERNELS
        values = shape.blocks * (image + text) * STREAM + merges * (image + text) * MERGE
        if shape.cross_attention:
            kernels += shape.plain_blocks * CROSS_KERNELS
            values += shape.plain_blocks * image * CROSS_STREAM
        attention = shape.blocks * self._attention_flops(image, text) / self.attention_rate
        parts = Parts(
            products=share * products,
            attention=share * attention,
            memory=share * self.rows * values * shape.hidden * WIDTH / self.memory_rate,
            launch=share * kernels * LAUNCH_S,
            communication=0.0,
        )
        return replace(parts, communication=self._exposed(parts, image, text, patches, stages))

    def _products(self, kind: str, image: int, text: int) -> float:
        """Seconds of a block's matrix products."""
        h = self.shape.hidden
        joint = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h))
        match kind:
            case "double":
                return sum(self._product(tokens, *size) for tokens in (image, text) for size in joint)
            case "single":
                return sum(self._product(image + text, *size) for size in ((7 * h, h), (h, 5 * h)))
            case _:
                cross = 2 * self._product(image, h, h) + self._product(self.shape.text, 2 * h, h)
                return sum(self._product(image, *size) for size in joint) + (cross if self.shape.cross_attention else 0.0)

    def _product(self, tokens: int, columns: int, inner: int) -> float:
        """Seconds of [tokens, inner] x [inner, columns], at least those of reading the weights."""
        rows = self.rows * tokens
        if rows == 0:
            return 0.0
        flops = 2 * rows * columns * inner
        return max(flops / (self.matrix_rate * filled(rows, columns, inner)), columns * inner * WIDTH / self.memory_rate)

    def _attention_flops(self, image: int, text: int) -> float:
        """FLOPs of one block on one GPU: its queries, or its heads, against all keys."""
        keys = self.request.tokens + self.shape.joint_text
        flops = 4 * self.rows * (image + text) * keys * self.shape.hidden
        return flops + (4 * self.rows * image * self.shape.text * self.shape.hidden if self.shape.cross_attention else 0)

    def _exposed(self, parts: Parts, image: int, text: int, patches: int, stages: int) -> float:
        layout, shape = self.layout, self.shape
        size = self.rows * (image + text) * shape.hidden * WIDTH
        seconds = self.guidance()
        if stages > 1:
            send = self._send("pipeline", size, stages, 1)
            return seconds + patches * max(0.0, send - parts.compute / patches)
        if layout.ulysses > 1:
            for values in (3 * size, size):
                seconds += shape.blocks * self.ground.exchange("ulysses", "all_to_all", values, 1, layout.ulysses, 1).seconds
        if layout.ring > 1:
            send = self._send("ring", 2 * size, layout.ring, layout.ulysses)
            hidden = parts.attention / shape.blocks / layout.ring
            seconds += shape.blocks * (layout.ring - 1) * max(0.0, send - hidden)
        return seconds

    def _send(self, dimension: str, size: float, ranks: int, stride: int) -> float:
        """Seconds of the slowest send between neighbours of a group: over the network, if the group spans several domains."""
        spans = ranks * stride > self.gpu.domain
        return self.ground.exchange(dimension, "send", size, 1, ranks, max(stride, self.gpu.domain) if spans else stride).seconds

    def guidance(self) -> float:
        """All-gather of both predictions, in fp32 latents of 16 channels."""
        if self.layout.cfg == 1:
            return 0.0
        size = 2 * self.request.batch * self.request.tokens * 4 * 16 * 4
        stride = self.layout.sequence * self.layout.pipefusion
        return self.ground.exchange("cfg", "all_gather", size, 1, 2, stride).seconds

    def memory(self) -> float:
        """Bytes on one GPU: weights, text encoders, activations, and PipeFusion's keys and values of the previous step."""
        shape, layout = self.shape, self.layout
        tokens = self.request.tokens + shape.joint_text
        weights = shape.parameters * WIDTH * ceil(shape.blocks / layout.pipefusion) / shape.blocks
        activations = self.rows * ceil(tokens / layout.sequence / layout.pipeline_patches) * shape.hidden * WIDTH * LIVE
        stale = 0.0
        if layout.pipefusion > 1:
            stale = 2 * self.rows * tokens * shape.hidden * WIDTH * ceil(shape.blocks / layout.pipefusion)
        return weights + shape.text_parameters_b * 1e9 * WIDTH + activations + stale + RUNTIME_BYTES
