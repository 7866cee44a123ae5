"""Texts inside objects that Kubernetes does not parse: Serve configurations, recipes, Prometheus rules, YAML and JSON."""
