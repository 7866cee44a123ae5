"""Autoscaling in a simulation: replicas that start, drain and are counted, by the policies of production and of Ray Serve."""
