"""Patches of Ray. Each file names its reason and when it is no longer needed; its test fails then."""

WRITTEN_FOR = "2.60"
