"""RMSNorm with an optional residual addition, forward and backward."""
