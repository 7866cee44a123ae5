"""Sampling of tokens from logits: definition, kernel and operator."""
