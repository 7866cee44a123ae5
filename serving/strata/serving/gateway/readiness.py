"""Readiness of the endpoint, which `GET /ready` reports.

`/health` answers whether a request would be answered now, by any engine. `/ready` answers whether the endpoint is complete: every
pool has a healthy replica and, where the starter warms the engines up, the warm-up has passed.
"""

import asyncio
import logging

from strata.serving.transport.directory import Directory
from strata.serving.transport.peers import Peers

logger = logging.getLogger("ray.serve")

POLL_S = 0.2
WARM_UP = "warm-up"  # role of the directory entry that the starter publishes after its warm-up
PASSED = "passed"  # its name


class Readiness:
    """Readiness of the pools. `warm_up` is the directory to wait in for the warm-up's entry, None where nothing warms up."""

    def __init__(
        self,
        decode: Peers,
        prefill: Peers | None,
        warm_up: Directory | None = None,
        role: str = "decode",
        to_zero: bool = False,
    ) -> None:
        """`role`: of the replicas that answer. `to_zero`: their pool may be empty, and a request brings a replica back."""
        self._pools = {role: decode} | ({"prefill": prefill} if prefill is not None else {})
        self._answering, self._to_zero = decode, to_zero
        self._warm = warm_up is None
        if warm_up is not None:
            self._looking = asyncio.get_running_loop().create_task(self._wait_for_warm_up(warm_up))

    def obstacle(self) -> str | None:
        """The first reason why the endpoint is not ready, None if it is."""
        for role, pool in self._pools.items():
            if pool is self._answering and self.scaled_to_zero():
                continue
            if not any(peer.healthy for peer in pool.all()):
                return f"No healthy {role} replica is up."
        return None if self._warm else "The warm-up has not passed yet."

    def scaled_to_zero(self) -> bool:
        """True where the answering pool may be empty and is."""
        return self._to_zero and not self._answering.all()

    async def _wait_for_warm_up(self, directory: Directory) -> None:
        """Ends once the entry is found. `/ready` reports the wait; its deadline is the starter's."""
        failing = False
        while not self._warm:
            try:
                self._warm, failing = PASSED in await directory.names(WARM_UP), False
            except Exception:  # the GCS is down: one line per outage
                if not failing:
                    logger.exception("The directory cannot be read for the warm-up; retrying.")
                failing = True
            await asyncio.sleep(POLL_S)


async def publish_warm_up(directory: Directory) -> None:
    await directory.publish(WARM_UP, PASSED, {})
