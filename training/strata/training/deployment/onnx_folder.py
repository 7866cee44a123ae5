"""Writes a decoder as ONNX, with the KV cache as inputs and outputs under the names that Optimum and onnxruntime-genai use."""

import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from strata.platform.model_families.hub import SMALL_FILES
from strata.training.deployment.experts import GROUPED, onnx_translations, traceable
from strata.training.deployment.step import INPUTS, CacheShape, trace

FILE = "model.onnx"
BATCH, NEW, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
AXES = dict(zip(INPUTS, ((BATCH, NEW), (BATCH, TOTAL), (BATCH, NEW)), strict=True))
PAST_AXES = (BATCH, None, PAST, None)
LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")
MOST_INSIDE = 2**31 - 2**26  # bytes of weights in the file itself: protobuf ends at 2 GiB, and the graph needs some of it


def write(model: Any, shape: CacheShape, source: Path, folder: Path, most_inside: int = MOST_INSIDE) -> Path:
    """Writes the model, and copies the configuration and the tokenizer of `source`. Larger weights go to a file beside it."""
    with traceable(model, GROUPED):
        program = trace(model, shape)
    with _quiet():
        converted = torch.onnx.export(
            program,
            input_names=[*INPUTS, *shape.names("past_key_values")],
            output_names=["logits", *shape.names("present")],
            custom_translation_table=onnx_translations(),
            dynamo=True,
            verbose=False,
        )
    assert converted is not None
    graph: Any = converted.model.graph
    _name_axes(graph)
    for node in graph.all_nodes():
        node.metadata_props.clear()  # the lines of source code behind it, by their paths on this machine
    size = sum(weight.const_value.nbytes for weight in graph.initializers.values())
    converted.save(folder / FILE, external_data=size > most_inside)
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy(file, folder)
    return folder / FILE


def _name_axes(graph: Any) -> None:
    """Gives the dynamic axes their names. The exporter's are symbols such as s10, and sums of them."""
    given = [AXES.get(value.name, PAST_AXES) for value in graph.inputs]
    names = {
        dimension.value: axis
        for value, axes in zip(graph.inputs, given, strict=True)
        for dimension, axis in zip(value.shape, axes, strict=True)
        if axis is not None
    }
    values = [*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)]
    for value in values:
        for number, dimension in enumerate(value.shape or ()):
            if not isinstance(dimension, int) and dimension.value is not None:
                value.shape[number] = re.sub(r"\w+", lambda symbol: names.get(symbol[0], symbol[0]), dimension.value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings about operations of other libraries and about attributes whose defaults are right."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
