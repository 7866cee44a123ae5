"""Replica of a picture endpoint: requests, batches, and the group of worker processes that samples them."""
