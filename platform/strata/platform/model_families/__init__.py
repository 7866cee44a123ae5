"""Open models that training can start from: their configurations, tensor names and sources."""
