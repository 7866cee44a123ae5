"""Reports on a profile of an endpoint: terminal, page and JSON."""
