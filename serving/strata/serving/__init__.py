"""A vLLM endpoint under Ray Serve, disaggregated into prefill and decode, with KV blocks going over NIXL."""
