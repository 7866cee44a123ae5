"""`strata bench quantized`: decode speed of vLLM engines on one model shape in several formats of weights."""
