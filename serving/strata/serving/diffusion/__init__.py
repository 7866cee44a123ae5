"""Pictures from diffusion transformers: loading, sampling, and layouts over several workers."""
