"""Additions to the manifests that depend on the recipe: copies of models, and the history server's bucket."""
