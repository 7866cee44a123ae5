"""GPU readings through NVML, and their Prometheus exporter."""
