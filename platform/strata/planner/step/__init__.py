"""Time of a training step: compute, communication, and stages."""
