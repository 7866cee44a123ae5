"""From files to batches: readers, tokenizer, shards, windows, and the sampler."""
