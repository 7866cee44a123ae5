"""Failures, checkpoint intervals, and the cost of a token budget."""
