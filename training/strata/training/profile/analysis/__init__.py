"""Analysis of traces: time of a step by cause, and findings. Needs no torch."""
