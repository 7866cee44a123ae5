"""Targets of the loss."""

IGNORED = -100  # target that counts for nothing; the default of torch's cross-entropy
