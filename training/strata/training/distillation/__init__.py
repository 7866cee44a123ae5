"""Distillation: a model learns the next-token distribution of a larger one, such as a draft model for speculative decoding."""
