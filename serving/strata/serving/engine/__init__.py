"""vLLM engine in a replica: RPC handlers, disaggregated prefill, and crash attribution."""
