"""Models of an endpoint beside the one that it was started with, and new weights of any."""
