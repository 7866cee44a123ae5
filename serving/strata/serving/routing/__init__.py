"""Prefill placement policy and an estimate of the prefix cache."""
