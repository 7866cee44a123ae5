"""Benchmark of the matrix product's steps."""
