"""Fused linear layer and cross-entropy loss, in chunks of tokens."""
