"""Preference optimization: losses of pairs and of labelled answers, document log-probabilities, and a cache of the reference model's."""
