"""Tokens that tenants have spent on each UTC day, and their copy in the key-value store of Ray's GCS.

Each gateway counts its own tokens and writes them under its own name; the sum over all gateways counts for a budget. A restarted
gateway has another name, so the tokens of its predecessor stay counted. Every day has its own count: a clock that jumps back or
ahead resumes the count of that day and cannot reset it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("ray.serve")

DAY_S = 86_400
DAYS = 8  # days that are stored
SYNC_S = 1.0
ROLE = "spent"

ByDay = dict[int, dict[str, int]]  # tokens by day since 1970 and tenant


class Store(Protocol):
    """The part of `transport.Directory` that is used."""

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None: ...

    async def withdraw(self, role: str, name: str) -> None: ...

    async def names(self, role: str) -> set[str]: ...

    async def entry(self, role: str, name: str) -> dict[str, Any] | None: ...


class Spending:
    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._own: ByDay = {}
        self._others: dict[str, ByDay] = {}
        self._changed = False

    def today(self) -> int:
        return int(self._wall() // DAY_S)

    def until_tomorrow_s(self) -> float:
        return DAY_S - self._wall() % DAY_S

    def spent(self, tenant: str) -> int:
        """Tokens of today, over all gateways."""
        day = self.today()
        return sum(days.get(day, {}).get(tenant, 0) for days in (self._own, *self._others.values()))

    def add(self, tenant: str, tokens: int, day: int) -> None:
        """Adds tokens to a day; negative ones correct an estimate of that day."""
        tenants = self._own.setdefault(day, {})
        tenants[tenant] = tenants.get(tenant, 0) + tokens
        self._changed = True
        while len(self._own) > DAYS:
            del self._own[min(other for other in self._own if other != day)]

    async def sync(self, store: Store, name: str) -> None:
        """Writes the own tokens, and reads those of the other gateways."""
        if self._changed:
            self._changed = False
            try:
                await store.publish(ROLE, name, {str(day): tenants for day, tenants in self._own.items()})
            except BaseException:
                self._changed = True
                raise
        found: dict[str, ByDay] = {}
        for other in await store.names(ROLE) - {name}:
            entry = await store.entry(ROLE, other)
            if entry is None:
                continue
            days = {int(day): tenants for day, tenants in entry.items()}
            if max(days, default=0) < self.today() - DAYS:
                await store.withdraw(ROLE, other)
            else:
                found[other] = days
        self._others = found

    async def sync_forever(self, store: Store, name: str) -> None:
        """Keeps the last known tokens of other gateways while the store does not answer."""
        failing = False
        while True:
            try:
                await self.sync(store, name)
                failing = False
            except Exception:  # one line per outage
                if not failing:
                    logger.warning("The tokens spent today could not be stored; retrying.", exc_info=True)
                failing = True
            await asyncio.sleep(SYNC_S)
