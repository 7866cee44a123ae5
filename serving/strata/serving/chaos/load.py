"""Closed-loop load: concurrent clients, each sending the next request when its last one is answered."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from strata.serving import access
from strata.serving.chaos.client import Attempt, send
from strata.serving.chaos.requests import Request

RETRY_FOR_S = 120.0  # a gateway and the controller that replaces it may be killed together
LONGEST_WAIT_S = 1.0


@dataclass(frozen=True)
class Sent:
    """A request and its attempts. All but the last were broken by the death of a gateway."""

    number: int  # index in the requests
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]


async def drive(
    url: str,
    requests: Sequence[Request],
    concurrency: int,
    salt: str,
    goes_on: Callable[[], bool] = lambda: False,
    excused: Callable[[Attempt], bool] = lambda attempt: False,
) -> list[Sent]:
    """Sends every request once, and then starts over while `goes_on` is true.

    Retries a failed attempt if it is `excused`, as the `openai` client does by itself."""
    numbers = itertools.count()
    sent: list[Sent] = []

    async def one_client(http: httpx.AsyncClient) -> None:
        while True:
            cycle, number = divmod(next(numbers), len(requests))
            if cycle and not goes_on():
                return
            request = requests[number].salted(f"{salt}-{cycle}")
            sent.append(Sent(number, await _until_answered(http, request, excused)))

    # Expire idle connections before a server's usual five seconds, so that no request meets one being closed.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=2.0)
    async with (
        httpx.AsyncClient(base_url=url, headers=access.headers_for(url), limits=limits) as http,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(concurrency):
            clients.create_task(one_client(http))
    return sorted(sent, key=lambda one: one.attempts[0].began)


async def _until_answered(http: httpx.AsyncClient, request: Request, excused: Callable[[Attempt], bool]) -> tuple[Attempt, ...]:
    attempts = [await send(http, request)]
    wait = 0.1
    while excused(attempts[-1]) and attempts[-1].ended - attempts[0].began < RETRY_FOR_S:
        await asyncio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)
        attempts.append(await send(http, request))
    return tuple(attempts)
