"""Prometheus series of gateways and replicas."""
