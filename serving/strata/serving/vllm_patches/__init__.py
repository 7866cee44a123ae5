"""Replaced or extended internals of vLLM and its NIXL connector. Written for vLLM 0.29."""
