"""Memory of a training step: model state under ZeRO, activations, and buffers."""
