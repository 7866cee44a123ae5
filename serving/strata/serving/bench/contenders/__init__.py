"""Endpoints under test, ours and peers, and how each is started."""
