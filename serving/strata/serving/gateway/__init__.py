"""HTTP gateway: accepts client requests and relays them to decode replicas. Runs without vLLM, one or more processes per host."""
