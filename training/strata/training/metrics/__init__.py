"""Metrics of a run: records, progress display, plots, and Prometheus series."""
