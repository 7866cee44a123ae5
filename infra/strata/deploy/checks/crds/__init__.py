"""Schemas of other projects' kinds, from their CustomResourceDefinitions: strict validation, defaults and CEL rules."""
