"""Patches of vLLM and of its NIXL connector. Each file names its reason and when it is no longer needed; its test fails then."""

WRITTEN_FOR = "0.29"
