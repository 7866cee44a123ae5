"""Tenants of an endpoint: keys, limits, fair queueing, budgets, cache salts and the audit log."""
