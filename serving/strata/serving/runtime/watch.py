"""Monitors a running endpoint for `strata serve`: prints missing replicas, the effect on requests, and the recovery.

A gateway counts the replicas over its links. Only Ray Serve's controller knows whether a dead replica is being replaced.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from strata.platform.errors import UserError
from strata.platform.metrics import SERVE_REPLICAS
from strata.platform.ray_cluster.watch import ClusterDied, dead_part
from strata.platform.recipe import ServeSection
from strata.serving.catalogue.store import Store
from strata.serving.metrics import counters

logger = logging.getLogger(__name__)

LOOK_S = 2.0
ANSWER_S = 8.0  # a gateway waits up to five seconds for each replica's metrics
SURE_S = 3.0  # shorter outages are not printed
LOST_S = 300.0  # as long as requests may wait in a gateway

MEANWHILE = {
    "decode": "prefill replicas answer meanwhile",
    "prefill": "decode replicas prefill meanwhile",
    "gateway": "the others answer meanwhile",
    "pictures": "requests are queued meanwhile",
}


@dataclass(frozen=True)
class Observation:
    """State of the endpoint. `replicas`, by role, is None if no gateway answers. `given_up`: Serve's reason to stop retrying.
    `further`: the wanted replicas that the catalogue has. Roles of models beside the main one follow the model's name: 'small
    decode'."""

    replicas: Mapping[str, float] | None
    controller: bool
    given_up: str | None = None
    further: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Watch:
    url: str
    wanted: Mapping[str, int]
    report: Callable[[str], None]
    _since: dict[str, float] = field(default_factory=dict)  # start time of each outage
    _reported: set[str] = field(default_factory=set)
    _answered: float | None = None  # last time at which requests could be answered

    def update(self, seen: Observation, now: float) -> None:
        """Reports changes. Raises UserError if the endpoint will not recover by itself."""
        missing = self._missing(seen)
        self._since = {what: self._since.get(what, now) for what in missing}
        for what, line in missing.items():
            if now - self._since[what] >= SURE_S and what not in self._reported:
                self._reported.add(what)
                self.report(line)
        if self._reported and not missing:
            self._reported.clear()
            complete = {role: number for role, number in self._all_wanted(seen).items() if number}
            self.report(f"The endpoint has recovered: {', '.join(f'{number} {role}' for role, number in complete.items())}.")
        self._reported &= missing.keys()
        empty = seen.replicas is not None and seen.given_up is None and not self.wanted.keys() - {"gateway"}
        if self._answered is None or _engines(seen) or empty:  # a pool that was scaled to zero is empty, not lost
            self._answered = now
        elif seen.given_up is not None or now - self._answered > LOST_S:
            why = seen.given_up or f"nothing has answered for {now - self._answered:.0f} s"
            raise UserError(f"The endpoint at {self.url} is lost: {why}", "Restart it. Ray's logs have the reason.")

    def _all_wanted(self, seen: Observation) -> dict[str, int]:
        return dict(self.wanted) | dict(seen.further)

    def _missing(self, seen: Observation) -> dict[str, str]:
        missing = {}
        if not seen.controller:
            missing["controller"] = (
                "Ray Serve's controller does not answer. Requests are answered as before; "
                "dead replicas are replaced when it is back."
            )
        if seen.replicas is None:
            return missing | {"gateway": f"No gateway answers at {self.url}; Ray Serve is starting one."}
        engines = _engines(seen)
        for role, number in self._all_wanted(seen).items():
            there = int(seen.replicas.get(role, 0))
            if there < number:
                model, _, kind = role.rpartition(" ")
                own = [name for name in seen.replicas if name.rpartition(" ")[0] == model] if model else engines
                waits = MEANWHILE[kind] if own else "requests are queued meanwhile"
                others = "the others answer meanwhile" if there else waits
                missing[role] = f"{there} of {number} {role} replicas answer; Ray Serve is starting another, {others}."
        return missing


def _engines(seen: Observation) -> float:
    """Replicas that can answer a request."""
    return sum(number for role, number in (seen.replicas or {}).items() if role != "gateway")


class _StatusCall:
    """A call of Serve's status in a daemon thread, and of the wanted replicas of further models."""

    def __init__(self, status: Callable[[], Any], further: Callable[[], Mapping[str, int]]) -> None:
        self._status, self._further = status, further
        self.answer: Mapping[str, Any] | None = None  # Serve's applications
        self.further: Mapping[str, int] = {}
        self.done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.further = self._further()
            self.answer = self._status().applications
        except Exception as error:  # Ray raises many types for a dead actor
            logger.debug("Serve's controller does not answer: %s", error)
        self.done.set()


class Observer:
    """Queries the endpoint and Serve's controller. Neither can block the other."""

    def __init__(
        self, url: str, status: Callable[[], Any], model: str | None = None, further: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """`model`: the main one; None: there is one only. `further` returns the wanted replicas of the others."""
        self._model, self._further = model, further
        self._last_further: Mapping[str, int] = {}
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, limits=httpx.Limits(max_keepalive_connections=0))
        self._status = status
        self._pending: _StatusCall | None = None

    def observe(self) -> Observation:
        try:
            text = self._http.get("/metrics").raise_for_status().text
            replicas = self._roles(counters.parse(text))
        except httpx.HTTPError:
            replicas = None
        return Observation(replicas, *self._controller(), self._last_further)

    def _roles(self, values: Mapping[counters.Series, float]) -> dict[str, float]:
        """Replicas by role, those of further models after the model's name."""
        if self._model is None:
            return counters.by(values, SERVE_REPLICAS, "role")
        found = counters.by(values, SERVE_REPLICAS, "model", "role")
        return {key.removeprefix(f"{self._model} "): number for key, number in found.items()}

    def _controller(self) -> tuple[bool, str | None]:
        """True if the controller answers, and its reason if it gave up on the application.

        A call during a restart of the controller may be answered late, so it stays pending and is not repeated."""
        from strata.serving.runtime.deployments import NAME

        self._pending = self._pending or _StatusCall(self._status, self._further)
        if not self._pending.done.wait(LOOK_S):
            return False, None
        self._last_further = self._pending.further
        applications, self._pending = self._pending.answer, None
        if applications is None:
            return False, None
        if NAME not in applications:
            return True, "the application was deleted"
        failed = [one.message for one in applications[NAME].deployments.values() if one.status == "DEPLOY_FAILED"]
        return True, " ".join(failed[0].split())[-300:] if failed else None


def wanted(section: ServeSection) -> dict[str, int]:
    roles = {"gateway": section.gateways, "prefill": section.prefill.replicas, "decode": section.decode.replicas}
    return {role: number for role, number in roles.items() if number}


def further(model: str) -> dict[str, int]:
    """Wanted replicas of the models beside the main one that serve, and of the main one if it was updated. Blocks on the head."""
    catalogue = asyncio.run(Store(model).read())
    found: dict[str, int] = {}
    for name, each in catalogue.models.items() if catalogue is not None else ():
        if each.serving is not None and (each.serving.id or not each.main):
            section, prefix = ServeSection.model_validate(each.serving.section), "" if each.main else f"{name} "
            found |= {f"{prefix}prefill": section.prefill.replicas, f"{prefix}decode": section.decode.replicas}
    return found


def until_lost(url: str, model: str, replicas: Mapping[str, int], report: Callable[[str], None]) -> None:
    """Monitors until KeyboardInterrupt, or UserError if the endpoint is lost."""
    from ray import serve

    watch, observer = Watch(url, replicas, report), Observer(url, serve.status, model, lambda: further(model))
    while True:
        if dead_part() == "raylet":  # the cluster cannot recover from this; a dead GCS is restarted (`gcs.py`)
            raise ClusterDied(
                f"The endpoint at {url} is lost: Ray's node service (raylet) on this machine has died.",
                "Restart it with the same command. Its port is free.",
            )
        watch.update(observer.observe(), time.monotonic())
        time.sleep(LOOK_S)
