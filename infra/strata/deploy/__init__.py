"""Onto Kubernetes: the manifests of `infra/`, filled in from a recipe, checked, compared and applied."""
