"""KV cache tiers beyond an engine's own memory: host memory, and files on a disk.

vLLM's offloading connector moves blocks between the tiers. This folder adds what it lacks: copies on CPU engines, files that are
bounded, checked and bound to the weights that computed them, and counts by tier.
"""
