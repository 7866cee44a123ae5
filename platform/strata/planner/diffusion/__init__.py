"""Cost of sampling from diffusion transformers: layouts over GPUs, step time, memory, and published figures to compare with."""
