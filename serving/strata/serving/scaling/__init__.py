"""Scaling of the pools by service-level objectives: pure functions, called by Ray Serve's autoscaler and by the simulation."""
