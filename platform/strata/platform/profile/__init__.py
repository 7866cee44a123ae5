"""Profiles of training and serving: traces of torch's profiler, work on the roofline, findings, and pages of a report."""
