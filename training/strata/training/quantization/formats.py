"""Formats of quantized weights, by the names that `--format` takes. Light: the command line imports it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strata.platform.errors import UserError, shown

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

GROUP_SIZES = (128, 64, 32)  # that vLLM has fast kernels for


@dataclass(frozen=True)
class Format:
    """`preset` names the scheme in compressed-tensors, and `method` decides how weights are rounded to it:

    - gptq: the error of each input column is compensated by the columns after it (arXiv:2210.17323)
    - awq: channels with large activations are scaled up before rounding to nearest (arXiv:2306.00978)
    - smooth: outliers of activations move into the weights before rounding to nearest (arXiv:2211.10438)
    - nearest: no calibration
    """

    name: str
    preset: str
    method: Literal["gptq", "awq", "smooth", "nearest"]
    bits: int

    @property
    def grouped(self) -> bool:
        """Weights have a scale for each group of input columns, not for each output channel."""
        return self.bits == 4

    @property
    def calibrated(self) -> bool:
        return self.method != "nearest"

    def scheme(self, group_size: int | None, head: str | None = None) -> "QuantizationScheme":
        """`head` is the name of the output layer, if it is quantized: vLLM's class for it is none of its linear layers."""
        from compressed_tensors.quantization import preset_name_to_scheme

        scheme = preset_name_to_scheme(self.preset, ["Linear", *([head] if head else [])])
        if self.grouped:
            assert group_size and scheme.weights
            scheme.weights = scheme.weights.model_copy(update={"group_size": group_size})
        return scheme


FORMATS = {
    each.name: each
    for each in (
        Format("w4a16-gptq", "W4A16", "gptq", 4),
        Format("w4a16-awq", "W4A16_ASYM", "awq", 4),
        Format("w8a8-int8", "W8A8", "smooth", 8),
        Format("w8a8-fp8", "FP8_DYNAMIC", "nearest", 8),
    )
}


def named(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"--format {shown(name)} is not a format of weights.", f"Use one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def require_group_size(size: int | None) -> None:
    if size is not None and size not in GROUP_SIZES:
        cause = f"--group-size {size} is not a size of groups that kernels compute."
        raise UserError(cause, f"Use one of {', '.join(map(str, GROUP_SIZES))}.")
