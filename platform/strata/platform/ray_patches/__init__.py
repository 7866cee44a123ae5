"""Replaced functions and constants of Ray. Written for Ray 2.60; `tests/platform/test_ray_patches.py` checks each of them."""
