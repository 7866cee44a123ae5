"""Layouts of one sampling call over several workers."""
