"""Steps of an exported model, computed by the runtime that a user would load it with."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor
from torch import Tensor

from strata.training.deployment.step import INPUTS, CacheShape, inputs

# From new ids [batch, new], mask [batch, past + new] and past to logits [batch, new, vocabulary] and the longer cache.
Runner = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


def onnx_runner(file: Path, shape: CacheShape) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [*INPUTS, *shape.names("past_key_values")]

    def step(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        *first, cache = inputs(ids, mask, past)
        fed = dict(zip(names, [tensor.numpy() for tensor in (*first, *cache)], strict=True))
        logits, *present = (torch.from_numpy(array) for array in session.run(None, fed))
        return logits, present

    return step


def package_runner(file: Path) -> Runner:
    compiled = torch._inductor.aoti_load_package(str(file))

    def step(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, present = compiled(*inputs(ids, mask, past))
        return logits, present

    return step
