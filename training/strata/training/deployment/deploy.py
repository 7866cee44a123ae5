"""Writes the requested exports of a Hugging Face folder, and checks each before it has its final name."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.training.deployment import model_folder, onnx_folder, package, prompts, report, runners, tensorrt_engine
from strata.training.deployment.building import building
from strata.training.deployment.check import Comparison, compare
from strata.training.deployment.request import Request
from strata.training.deployment.step import CacheShape, cache_shape


def deploy(folder: Path, request: Request, console: Console) -> None:
    console.print(f"loading {folder}")
    if not console.is_terminal:
        transformers.utils.logging.disable_progress_bar()
    model = model_folder.load(folder, request.dtype, request.device)
    shape = cache_shape(model)
    check = _Check(model, shape, _prompts(model, folder, request), request.tokens, console)
    if request.onnx is not None:
        _write_onnx(check, folder, request.onnx)
        if request.tensorrt is not None:
            console.print("building the TensorRT engine")
            onnx = request.onnx / onnx_folder.FILE
            tensorrt_engine.build(onnx, request.tensorrt, shape, model_folder.context_of(model))
            console.print(f"engine written to {request.tensorrt}")
    if request.package is not None:
        _write_package(check, request.package)


class _Check:
    """The model, and the prompts with which each of its exports is compared."""

    def __init__(self, model: Any, shape: CacheShape, ids: Sequence[Sequence[int]], tokens: int, console: Console) -> None:
        self.model, self.shape, self.console = model, shape, console
        self._ids = ids
        self._tokens = max(1, min(tokens, model_folder.context_of(model) - max(map(len, ids))))

    def __call__(self, runtime: str, run: runners.Runner, written: Path) -> None:
        self.console.print(f"checking {len(self._ids)} prompts, {self._tokens} tokens each, against transformers")
        comparison = self._compare(run)
        report.show(self.console, runtime, comparison, report.size_of(written))
        report.require_equal(runtime, comparison)

    def _compare(self, run: runners.Runner) -> Comparison:
        columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True) as bar:
            row = bar.add_task("", total=len(self._ids))
            return compare(self.model, run, self.shape, self._ids, self._tokens, lambda: bar.advance(row))


def _prompts(model: Any, folder: Path, request: Request) -> list[list[int]]:
    longest = max(1, model_folder.context_of(model) - request.tokens)
    if request.prompts is not None:
        return prompts.from_file(request.prompts, folder, request.count, longest)
    return prompts.from_vocabulary(model.config, request.count, longest)


def _write_onnx(check: _Check, source: Path, target: Path) -> None:
    check.console.print("converting to ONNX")
    with building(target) as folder, _named(target):
        file = onnx_folder.write(check.model, check.shape, source, folder)
        check("onnxruntime", runners.onnx_runner(file, check.shape), folder)
        folder.chmod(0o755)
        folder.rename(target.resolve())
    check.console.print(f"ONNX model written to {target}")


def _write_package(check: _Check, target: Path) -> None:
    check.console.print("compiling with AOTInductor")
    with building(target) as folder, _named(target):
        file = package.write(check.model, check.shape, folder / target.name)
        check("AOTInductor", runners.package_runner(file), file)
        file.rename(target.resolve())
    check.console.print(f"package written to {target}")


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Errors of a full disk as file errors that name the target: libraries raise types of their own for them."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = file_errors.number_of(error)
        if number is None or isinstance(error, UserError):
            raise
        raise OSError(number, os.strerror(number), str(target)) from None
