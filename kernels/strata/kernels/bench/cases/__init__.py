"""Benchmark cases, one module per operation and named after it."""
