"""Load generation and client-side measurement."""
