"""A kernel's way from Triton to the machine's instructions, without the machine."""
