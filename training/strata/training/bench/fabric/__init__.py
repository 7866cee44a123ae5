"""Measures the network between the nodes of a cluster, compares it with the planner's model, and names slow nodes."""
