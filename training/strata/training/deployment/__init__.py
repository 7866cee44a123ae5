"""Exports for programs without Strata: ONNX models, AOTInductor packages and TensorRT engines, checked against transformers."""
