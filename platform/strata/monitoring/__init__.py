"""Watching what runs: Prometheus and Grafana on a laptop, the GPU exporter, and the same essentials in a terminal."""
