"""From text to a model that can be served: corpus, tokens, model, DeepSpeed under Ray Train, checkpoints and export."""
