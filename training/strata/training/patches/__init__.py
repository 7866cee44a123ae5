"""Replaced parts of Ray Train and torch. Written for Ray 2.60 and torch 2.13."""
