"""Request of one deployment: the targets to write, their numeric type and device, and the size of the check."""

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Request:
    """At least one of `onnx`, a folder, and `package`, a file, is set. `tensorrt`, a file, needs `onnx`."""

    onnx: Path | None
    package: Path | None
    tensorrt: Path | None
    dtype: str
    device: str
    prompts: Path | None  # file with a prompt on each line; None for prompts from the model's vocabulary
    count: int  # prompts of the check
    tokens: int  # that the check generates for each prompt
