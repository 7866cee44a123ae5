"""Triton kernels as torch operators: the same call runs on a CPU, under torch.compile and on Hopper."""
