"""Data pipeline: readers, tokenizer, token shards, windows, and the sampler."""
