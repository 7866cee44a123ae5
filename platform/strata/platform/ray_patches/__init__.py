"""Replaced functions and constants of Ray. Written for Ray 2.60; `tests/platform/ray_cluster/` checks each of them."""
