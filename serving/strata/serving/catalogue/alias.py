"""Alias of one or several models, by weight."""

import hashlib
import secrets
from collections.abc import Mapping

RESOLUTION = 2**64


def choose(alias: str, weights: Mapping[str, float], user: str | None) -> str:
    """Model for a request. The same `user` gets the same model while the weights stay; requests without one are spread."""
    seed = f"{alias}\0{user}".encode() if user is not None else secrets.token_bytes(16)
    point = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "big") / RESOLUTION * sum(weights.values())
    for model, weight in weights.items():
        point -= weight
        if point < 0:
            return model
    return [model for model, weight in weights.items() if weight][-1]  # rounding
