"""Local Prometheus server, scrape configuration, and the Kubernetes objects with the same rules."""
