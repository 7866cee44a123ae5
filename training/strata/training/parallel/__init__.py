"""Parallelism: a module for each kind, with a function that applies it. The model's code is independent of them."""
