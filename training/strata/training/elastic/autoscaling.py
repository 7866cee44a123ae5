"""Standing request to Ray's autoscaler for the largest number of workers of an elastic run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from strata.platform.ray_cluster import cluster


@contextmanager
def requested(worker: dict[str, float], count: int) -> Iterator[None]:
    """Requests nodes for `count` workers while the block runs, so that lost ones are replaced. Clusters without an autoscaler
    have what they have."""
    if not cluster.grows():
        yield
        return
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[worker] * count)
    try:
        yield
    finally:
        with suppress(Exception):  # the cluster may be gone
            request_resources(bundles=[])
