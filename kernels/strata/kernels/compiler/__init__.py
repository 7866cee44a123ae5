"""Compilation of Triton kernels to machine code without a GPU."""
