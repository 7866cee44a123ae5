"""Calibration of simulated engines by a measured endpoint, and comparison of the two under the same loads."""
