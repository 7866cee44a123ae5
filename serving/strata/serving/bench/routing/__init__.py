"""Benchmark of the choice of replicas: multi-turn conversations on several replicas, by cached prefixes and by load."""
