"""Shared foundation: recipes, runs, the Ray cluster, metric names and the command line."""
