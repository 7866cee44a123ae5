"""Monitoring: local Prometheus and Grafana, the GPU exporter, and `strata top` in the terminal."""
