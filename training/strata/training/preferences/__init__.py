"""Preference optimization: losses of pairs and of labelled answers, and a cache of the reference model's log-probabilities."""
