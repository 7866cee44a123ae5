"""Preference optimization: losses of pairs of answers, document log-probabilities, and a cache of the reference model's."""
