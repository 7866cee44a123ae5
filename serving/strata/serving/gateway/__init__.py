"""The endpoint's front: HTTP to clients, links to decode replicas. Light processes without vLLM, one or more on a host."""
