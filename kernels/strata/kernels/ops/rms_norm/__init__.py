"""RMS norm, forward and backward, with and without a residual."""
