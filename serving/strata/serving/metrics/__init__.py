"""Prometheus metrics of gateways and replicas."""
