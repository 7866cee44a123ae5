"""Watchdog of a training run: hangs, stragglers, corrupted replicas and spikes, each named with its rank and its cause."""
