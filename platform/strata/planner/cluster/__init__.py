"""A whole fleet: its control planes, monitoring, storage and spares, and a simulation of its job queue."""
