"""Strata's operations in other models: a `torch.compile` backend that finds them, and `patch` for Hugging Face's models."""


def register() -> None:
    """Makes `torch.compile(backend="strata")` known to torch. Needed only where Strata is imported without being installed: an
    installation registers the backend by its entry point."""
    from torch._dynamo import list_backends, register_backend

    from strata.kernels.graph.backend import strata

    if "strata" not in list_backends(exclude_tags=()):
        register_backend(strata, name="strata")
