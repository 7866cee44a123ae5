"""Models, GPUs, fabrics, training programs and failure rates by name."""
