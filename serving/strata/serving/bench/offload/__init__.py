"""`strata bench offload`: the second turn of a conversation whose KV blocks left the KV cache."""
