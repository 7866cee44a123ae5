"""How much arithmetic a token costs, how much a device could do, and so how well it is used (MFU).

The convention is PaLM's (Chowdhery et al. 2022, appendix B), which most published figures follow: 6 operations a token for each
parameter of a matrix product (2 forward, 4 backward), and 12 x layers x hidden x context for attention's two products,
without a discount for the causal half that a good kernel skips. The embedding is a lookup and costs nothing; the output
layer is a product, tied or not. Of a mixture of experts only those count that a token passes through. Activations that are
computed again are not counted: recomputing lowers MFU, as it should.
"""

import re
import time
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from strata.platform.recipe import Device, ModelSection

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16"]


def flops_per_token(section: ModelSection) -> int:
    """Forward and backward."""
    return 6 * matmul_parameters(section) + 12 * section.layers * section.hidden * section.context


def matmul_parameters(section: ModelSection) -> int:
    """Those that a token is multiplied with: no norms and no embedding, and top_k experts instead of all."""
    hidden = section.hidden
    attention = 2 * hidden**2 + 2 * hidden * section.kv_heads * section.head_dim
    feed_forward = 3 * hidden * section.ffn
    if section.moe:
        shared = 3 * hidden * section.moe.shared_ffn + (hidden if section.moe.shared_ffn else 0)  # with its gate
        feed_forward = feed_forward * section.moe.top_k + hidden * section.moe.experts + shared
    return section.layers * (attention + feed_forward) + hidden * section.vocab


def mfu(tokens_per_s: float, flops_per_token: float, workers: int, peak: float | None) -> float | None:
    """0 to 1; `peak` is one worker's. None where that is not known: a guess would look like a measurement."""
    return None if peak is None else tokens_per_s * flops_per_token / (workers * peak)


def peak_flops(device: Device, precision: Precision, threads: int) -> float | None:
    """Of the device this process computes on. A GPU's is from its datasheet; a CPU's is what its own products reach on
    `threads` threads, measured once a process (0.3 s): datasheets say nothing of the clock a shared machine gives.

    For fp32 both depend on torch's float32_matmul_precision, so set that first."""
    import torch

    matmul = torch.get_float32_matmul_precision()
    if device == "gpu":
        return gpu_peak(torch.cuda.get_device_name(), precision, tf32=matmul != "highest")
    return _measured(precision, threads, matmul)


class Peak(NamedTuple):
    """TFLOP/s, dense (datasheets lead with twice that, for sparse matrices). `tf32` is fp32 on tensor cores."""

    bf16: float | None
    tf32: float
    fp32: float


# From the makers' datasheets, by a pattern of the name that the driver gives; the first that is found counts.
GPUS: dict[str, Peak] = {
    r"V100.*PCIE": Peak(None, 14.0, 14.0),  # no bf16 in its tensor cores, and no TF32
    r"V100": Peak(None, 15.7, 15.7),
    r"\bA[18]00\b": Peak(312, 156, 19.5),
    r"\bH[18]00 PCIe": Peak(756, 378, 51),
    r"\bH[12]00 NVL": Peak(835.5, 417.5, 60),
    r"\bH[18]00\b": Peak(989.4, 494.7, 66.9),
    r"\bG?H200\b": Peak(989.4, 494.7, 66.9),
    r"\bH20\b": Peak(148, 74, 44),
    r"\bGB200\b": Peak(2500, 1250, 80),
    r"\bB200\b": Peak(2250, 1125, 75),
    r"\bL40S\b": Peak(362, 183, 91.6),
    r"\bL4\b": Peak(121, 60, 30.3),
    r"\bA10\b": Peak(125, 62.5, 31.2),
    r"RTX 4090$": Peak(165.2, 82.6, 82.6),  # bf16 with fp32 sums, as torch asks for; not the 4090 D or Laptop GPU
    r"MI300X": Peak(1307.4, 653.7, 163.4),
}


def gpu_peak(name: str, precision: Precision, tf32: bool) -> float | None:
    """`tf32`: whether fp32 products may be computed so."""
    peak = next((peak for pattern, peak in GPUS.items() if re.search(pattern, name)), None)
    if peak is None:
        return None
    tflops = peak.bf16 if precision == "bf16" else peak.tf32 if tf32 else peak.fp32
    return None if tflops is None else tflops * 1e12


SIZES = (256, 512, 1024)  # which one suits the caches best differs from CPU to CPU
SECONDS_A_SIZE = 0.1


@cache
def _measured(precision: Precision, threads: int, matmul: str) -> float:
    """The best of many products, for others use the machine too. `matmul` is torch's state: an argument for the cache."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_best_of(size, torch.bfloat16 if precision == "bf16" else torch.float32) for size in SIZES)
    finally:
        torch.set_num_threads(before)


def _best_of(size: int, dtype: "torch.dtype") -> float:
    import torch

    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    a @ b  # the first one chooses and compiles a kernel
    quickest, deadline = float("inf"), time.perf_counter() + SECONDS_A_SIZE
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        a @ b
        quickest = min(quickest, time.perf_counter() - begin)
    return 2 * size**3 / quickest
