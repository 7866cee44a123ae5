"""Records of a run, progress, and Prometheus series."""
