"""Builds a TensorRT engine from an ONNX model where TensorRT is installed. Not tested: CI has no TensorRT."""

import importlib.util
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.training.deployment.step import INPUTS, CacheShape

MOST_ROWS = 8


def build(onnx: Path, engine: Path, shape: CacheShape, context: int) -> None:
    if importlib.util.find_spec("tensorrt") is None:
        cause = f"--tensorrt needs TensorRT, not installed here. The ONNX model is ready: {onnx}."
        raise UserError(cause, "pip install tensorrt, on a machine with the GPU that runs the engine.")
    import tensorrt as trt  # type: ignore[import-not-found]

    builder = trt.Builder(logger := trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        raise UserError(f"TensorRT cannot read {onnx}: {parser.get_error(0)}.", "Use the ONNX model with onnxruntime.")
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    # Sizes: rows, new tokens, and past tokens; smallest, most frequent (a decoding step) and largest.
    sizes = ((1, 1, 0), (1, 1, context // 2), (MOST_ROWS, context, context))
    for name in INPUTS:
        past = name == "attention_mask"
        profile.set_shape(name, *[(rows, new + before * past) for rows, new, before in sizes])
    for name, (heads, width) in zip(shape.names("past_key_values"), shape.heads_and_widths, strict=True):
        profile.set_shape(name, *[(rows, heads, before, width) for rows, _, before in sizes])
    config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise UserError(f"TensorRT cannot build an engine from {onnx}.", "Read its messages above.")
    write_atomic(engine, bytes(built))
