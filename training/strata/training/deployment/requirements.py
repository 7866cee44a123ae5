"""Refusals before any work: missing packages or compiler, targets that exist, and numeric types that could not be checked."""

import errno
import importlib.util
import os
import shutil
from pathlib import Path

from strata.platform.errors import UserError, shown
from strata.training.deployment.request import DTYPES, Request

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def require_possible(request: Request) -> None:
    if request.tensorrt is not None and request.onnx is None:
        raise UserError("--tensorrt builds an engine from an ONNX model.", "Name a folder for the ONNX model as well: --onnx DIR")
    if request.dtype not in DTYPES:
        raise UserError(f"--dtype {shown(request.dtype)} is not a numeric type of exports.", f"Use one of {', '.join(DTYPES)}.")
    if request.prompts is not None and not request.prompts.is_file():
        raise UserError(f"--prompts {request.prompts} is not a file.", "Name a text file with a prompt on each line.")
    _require_device(request.device)
    if request.onnx is not None:
        _require_onnx(request)
        _require_free_folder(request.onnx, "--onnx")
    if request.package is not None:
        _require_compiler()
        if request.package.suffix != ".pt2":
            raise UserError(f"--package {request.package} does not end with .pt2.", f"Name it {request.package.name}.pt2.")
        _require_free_file(request.package, "--package")
    if request.tensorrt is not None:
        _require_free_file(request.tensorrt, "--tensorrt")


def _require_onnx(request: Request) -> None:
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {', '.join(missing)}, not installed here.", f"pip install {' '.join(missing)}")
    if request.dtype == "bfloat16":
        cause = "onnxruntime does not compute in bfloat16 on the CPU, so the ONNX model could not be checked."
        raise UserError(cause, "Use --dtype float32 or float16.")
    if request.device != "cpu":
        cause = f"The ONNX model is checked by onnxruntime on the CPU, not on {request.device}; it runs on any device."
        raise UserError(cause, "Leave --device out, or write the package by a command of its own.")


def _require_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {shown(device)} is not supported.", "Use --device cpu, cuda or cuda:0.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} needs a GPU, and there is none.", "Leave --device out.")


def _require_compiler() -> None:
    """AOTInductor calls the compiler in CXX, or else g++."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler.split()[0]) is None:
        cause = f"--package compiles the model and needs a C++ compiler; there is no {compiler}."
        raise UserError(cause, "Install one, such as by apt-get install g++, or set CXX to its path.")


def _require_free_folder(target: Path, option: str) -> None:
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{option} {target} exists and is not an empty folder.", f"Choose another folder with {option}.")
    _require_writable(target)


def _require_free_file(target: Path, option: str) -> None:
    if os.path.lexists(target):
        raise UserError(f"{option} {target} exists already.", f"Choose another file with {option}.")
    _require_writable(target)


def _require_writable(target: Path) -> None:
    """The exports take minutes, so a folder without permission is found before them."""
    folder = next(each for each in target.resolve().parents if each.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
