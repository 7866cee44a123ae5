"""Serving capacity: replicas, TTFT and ITL for a load of requests."""
