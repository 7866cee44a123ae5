"""Benchmark cases, one module per operation, named as the operation."""
