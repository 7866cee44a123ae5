"""Quantization of model folders: `strata quantize` writes compressed-tensors folders that vLLM serves."""
