"""Flash attention, forward and backward: portable Triton kernels, and Gluon kernels for Hopper."""
