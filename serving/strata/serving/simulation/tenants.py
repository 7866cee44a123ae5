"""Loads of several tenants: each sends a multiple of its fair share of the whole load."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from strata.platform.errors import UserError, shown
from strata.serving.simulation.requests import OwnText, Request
from strata.serving.tenants.tenant import Limits, Tenant

Timed = Iterator[tuple[float, Request]]
TEXTS = 2**40  # texts of one tenant are numbered apart from those of the next: tenants share no cached prefix


@dataclass(frozen=True)
class Sender:
    tenant: Tenant
    load: float  # in multiples of its share


def parse(text: str) -> list[Sender]:
    """Senders of `quiet=1,loud=10:2`: each with its load and, after a colon, its weight."""
    found: list[Sender] = []
    for part in text.split(","):
        name, _, rest = part.strip().partition("=")
        load, _, weight = rest.partition(":")
        try:
            sender = Sender(Tenant(name, Limits(weight=float(weight or 1))), float(load))
        except ValueError:
            sender = Sender(Tenant(""), 0.0)
        if not sender.tenant.name or not 0 < sender.load <= 1e6 or name in {each.tenant.name for each in found}:
            raise UserError(
                f"--tenants {shown(text)} is no list of tenants.",
                "Write NAME=LOAD or NAME=LOAD:WEIGHT, such as quiet=1,loud=10, with the load in multiples of the tenant's share.",
            )
        found.append(sender)
    return found


def shares(senders: list[Sender]) -> dict[str, float]:
    """Part of the whole load that each tenant sends."""
    total = sum(sender.tenant.limits.weight for sender in senders)
    return {sender.tenant.name: sender.load * sender.tenant.limits.weight / total for sender in senders}


def merged(senders: list[Sender], load: Callable[[float, int], Timed]) -> Timed:
    """Requests of all tenants in order of time. `load(share, number)` returns those of one tenant."""
    parts = shares(senders)
    streams = [
        _owned(load(parts[sender.tenant.name], number), sender.tenant.name, number) for number, sender in enumerate(senders)
    ]
    return heapq.merge(*streams, key=lambda timed: timed[0])


def _owned(load: Timed, tenant: str, number: int) -> Timed:
    for at, request in load:
        yield at, _own(request, tenant, number)


def _own(request: Request, tenant: str, number: int) -> Request:
    assert isinstance(request.text, OwnText)
    text = request.text
    # Openings are public names; a tenant's salt makes them its own.
    request.text = OwnText(text.number + number * TEXTS, text.opening + number * TEXTS, text.shared)
    request.tenant = tenant
    if request.then is not None:
        request.then = partial(_following, request.then, tenant, number)
    return request


def _following(then: Callable[[], tuple[float, Request] | None], tenant: str, number: int) -> tuple[float, Request] | None:
    after = then()
    return None if after is None else (after[0], _own(after[1], tenant, number))
