"""Checkpoints: format, saving, storage, ownership, resuming, and export."""
