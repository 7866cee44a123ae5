"""Compiles a decoder with AOTInductor into one file that torch loads without Python code of the model."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor

from strata.platform.errors import UserError, shown
from strata.training.deployment.experts import COPIED, traceable
from strata.training.deployment.step import CacheShape, attention_of_any_batch, trace


def write(model: Any, shape: CacheShape, file: Path) -> Path:
    with traceable(model, COPIED):
        program = trace(model, shape)
    options = {"aot_inductor.metadata": metadata(model, shape)}
    try:
        with torch.no_grad(), warnings.catch_warnings(), attention_of_any_batch(str(model.device)):
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # errors of Inductor, of Triton and of the C++ compiler
        cause = f"AOTInductor cannot compile {type(model).__name__}: {shown(f'{type(error).__name__}: {error}', 300)}"
        raise UserError(cause, "Check the C++ compiler, or export to ONNX (--onnx).") from error
    return file


def metadata(model: Any, shape: CacheShape) -> dict[str, str]:
    """Facts that a program without the model's configuration needs, in the package under these names."""
    end = model.generation_config.eos_token_id
    ends = [] if end is None else end if isinstance(end, list) else [end]
    return {
        "cache": json.dumps(shape.heads_and_widths),  # heads and width of key, value, key, ...
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": model.device.type,
        "eos_token_id": json.dumps(ends),
    }
