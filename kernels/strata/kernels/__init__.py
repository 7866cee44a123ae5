"""Triton kernels as torch operators: the same call trains on a laptop's CPU, under torch.compile and on Hopper."""
