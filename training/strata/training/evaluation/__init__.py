"""Evaluation of a model with lm-evaluation-harness, comparison of runs, and sample generations."""
