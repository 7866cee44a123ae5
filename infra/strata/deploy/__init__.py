"""Kubernetes deployment: renders the manifests of `infra/` from a recipe, validates, compares and applies them."""
