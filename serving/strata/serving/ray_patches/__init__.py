"""Replaced functions of Ray Serve. Written for Ray 2.60."""
