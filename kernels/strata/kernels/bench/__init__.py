"""Kernel benchmarks, one per operation and named after it; `strata bench kernels` runs them."""
