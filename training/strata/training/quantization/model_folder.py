"""Loads a model folder with transformers, quantized or not, in the numeric type of the computation."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata.platform.errors import UserError, shown


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {shown(name)} is not supported.", "Use --device cpu, cuda or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name} needs a GPU, and there is none.", "Leave --device out.")
    return device


def load(folder: Path, device: torch.device, quantized: bool = False) -> Any:
    """The model in float32 on a CPU, and in its own 16 bits on a GPU. A quantized one has dequantized weights, and rounds its
    activations in each forward pass if its format does."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(f"{folder} has no model that generates text: model_type={config.model_type}.", "Name another folder.")
        dtype = torch.float32 if device.type == "cpu" else stored_dtype(config)
        more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if quantized else {}
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True, **more
            )
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
        cause = f"The model in {folder} cannot be loaded: {shown(f'{type(error).__name__}: {error}', 200)}"
        raise UserError(cause, "Export it again, or name another folder.") from error
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"The weights in {folder} are incomplete: {shown(names, 200)} missing.", "Restore the folder.")
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress bars of compressed-tensors, which has no setting for them, and its remark on the option above."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def stored_dtype(config: Any) -> torch.dtype:
    """Numeric type of what stays unquantized. Kernels of quantized weights compute in 16 bits."""
    dtype = getattr(config, "dtype", None)
    return torch.float16 if dtype in (torch.float16, "float16") else torch.bfloat16


def context_of(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", 0) or 2048)
