"""A vLLM engine inside a replica: its calls, disaggregated prefill, and crash attribution."""
