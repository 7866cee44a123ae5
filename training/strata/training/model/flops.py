"""Model FLOPs utilization (MFU): FLOPs of a token, and the peak rate of the device.

FLOPs are counted by the planner (`strata.planner.step.flops`), peak rates of GPUs are in `strata.platform.hardware`.
"""

from strata.planner.catalogue import library
from strata.planner.step.flops import forward_flops
from strata.platform.hardware import catalogue, cpu_peak
from strata.platform.recipe import CHANNELS, Device, ModelSection, PictureSection, Precision


def flops_per_token(section: ModelSection, adapters: bool = False) -> int:
    """Forward and backward pass. With adapters, the model's own weights get no gradients, which is a third less. The products of
    adapters are too thin to count. Of a picture model, a token is a patch, and its share of the caption counts."""
    passes = 2 if adapters else 3
    if section.picture:
        return passes * _picture_flops(section, section.picture) // section.context
    return passes * int(forward_flops(library.from_recipe(section, "the recipe's model"), section.context))


def _picture_flops(section: ModelSection, picture: PictureSection) -> int:
    """Forward pass of one picture. A layer has twelve matrices of hidden x hidden for each stream, and as many for both streams'
    modulation; the last layer only reads the caption."""
    patches, captions, width, text = picture.patches, picture.caption_tokens, section.hidden, picture.text_hidden
    square = width**2
    layer = 12 * (patches + captions) * square + 12 * square + 2 * (patches + captions) ** 2 * width
    last = 9 * captions * square + 4 * square
    ends = 2 * patches * CHANNELS * picture.patch**2 * width + captions * text * width
    encoder = picture.text_layers * captions * (12 * text**2 + 2 * captions * text)
    return 2 * (section.layers * layer - last + ends + encoder)


def mfu(tokens_per_s: float, flops_per_token: float, workers: int, peak: float | None) -> float | None:
    """0 to 1; `peak` is one worker's. None where the peak is unknown: a guess would look like a measurement."""
    return None if peak is None else tokens_per_s * flops_per_token / (workers * peak)


def peak_flops(device: Device, precision: Precision, threads: int) -> float | None:
    """Peak rate of the device this process computes on. A GPU's is from its datasheet. A CPU's is what matrix products reach on
    `threads` threads, measured once per process (0.3 s): a datasheet does not know the clock of a shared machine.

    For fp32 both depend on torch's float32_matmul_precision, so set that first."""
    import torch

    matmul = torch.get_float32_matmul_precision()
    if device == "gpu":
        return gpu_peak(torch.cuda.get_device_name(), precision, tf32=matmul != "highest")
    return cpu_peak.measured(precision, threads, matmul)


def gpu_peak(device_name: str, precision: Precision, tf32: bool) -> float | None:
    """FLOP/s from the datasheet, by the driver's device name; None for an unknown card or a precision without hardware. `tf32`:
    whether fp32 products may use TF32 tensor cores."""
    device = catalogue.device_named(device_name)
    if device is None:
        return None
    fp32 = device.flops.get("tf32", device.flops["fp32"]) if tf32 else device.flops["fp32"]
    return device.flops.get("bf16") if precision == "bf16" else fp32
