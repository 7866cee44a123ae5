"""Admission control: limits the sequences in flight and rejects the excess with a 429.

An immediate 429 with Retry-After serves a client better than a queue in which its request would time out. With API keys,
`tenants.gate` admits instead, by tenant.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata.serving.api.requests import ApiError
from strata.serving.tenants.completions import Completions


def capacity(replicas: int, configured: int, max_sequences: int, max_queue: int) -> int:
    """Sequences that an endpoint may have in flight, running or queued. Of `configured` decode replicas, those that are being
    replaced count too: requests that wait for them will be served."""
    return max(replicas, configured) * max_sequences + max_queue


class Admission:
    def __init__(self, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`capacity` returns the sequences that this gateway may have in flight: the endpoint's, less those that other gateways
        admitted. It is called for every request, since replicas come and go."""
        self._capacity, self._completions = capacity, Completions(clock)
        self.admitted_sequences = 0

    @contextmanager
    def admitted(self, sequences: int) -> Iterator[None]:
        capacity = self._capacity()
        if self.admitted_sequences + sequences > capacity:
            wait = str(self._completions.retry_after(self.admitted_sequences + sequences - capacity, self.admitted_sequences))
            raise ApiError(429, f"Too many concurrent requests. Try again in {wait} s.", headers={"retry-after": wait})
        if not self.admitted_sequences:
            self._completions.busy()
        self.admitted_sequences += sequences
        try:
            yield
        finally:
            self.admitted_sequences -= sequences
            self._completions.ended(sequences)
