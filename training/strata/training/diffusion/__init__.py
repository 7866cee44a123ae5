"""Text-to-image diffusion transformers: model, flow matching, sampling, judge and export."""
