"""Watches a running endpoint for `strata serve`, and prints what is missing, what happens meanwhile, and when it is whole again.

Replicas are counted by a gateway, which has links to them. Whether a dead one is replaced only Ray Serve's controller knows.
"""

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
from strata.serving.metrics import counters

logger = logging.getLogger(__name__)

LOOK_S = 2.0
ANSWER_S = 8.0  # a gateway gives each replica five seconds for its numbers
SURE_S = 3.0  # what is over by then is not worth a line
LOST_S = 300.0  # as long as gateways let requests wait

MEANWHILE = {
    "decode": "prefill replicas answer meanwhile",
    "prefill": "decode replicas prefill meanwhile",
    "gateway": "the others answer meanwhile",
}


@dataclass(frozen=True)
class Seen:
    """One look. `replicas` by role is None if no gateway answers; `given_up` is Serve's reason if it stopped trying."""

    replicas: Mapping[str, float] | None
    controller: bool
    given_up: str | None = None


@dataclass
class Watch:
    url: str
    wanted: Mapping[str, int]
    tell: Callable[[str], None]
    _since: dict[str, float] = field(default_factory=dict)  # what is missing, and since when
    _told: set[str] = field(default_factory=set)
    _answered: float | None = None  # when a request could last be answered

    def take(self, seen: Seen, now: float) -> None:
        """Prints what changed. Raises UserError when the endpoint will not come back by itself."""
        missing = self._missing(seen)
        self._since = {what: self._since.get(what, now) for what in missing}
        for what, line in missing.items():
            if now - self._since[what] >= SURE_S and what not in self._told:
                self._told.add(what)
                self.tell(line)
        if self._told and not missing:
            self._told.clear()
            self.tell(f"The endpoint is whole again: {', '.join(f'{number} {role}' for role, number in self.wanted.items())}.")
        self._told &= missing.keys()
        if self._answered is None or (seen.replicas and (seen.replicas.get("decode") or seen.replicas.get("prefill"))):
            self._answered = now
        elif seen.given_up is not None or now - self._answered > LOST_S:
            why = seen.given_up or f"nothing has answered for {now - self._answered:.0f} s"
            raise UserError(f"The endpoint at {self.url} is lost: {why}", "Start it again; Ray's logs say what ended it.")

    def _missing(self, seen: Seen) -> dict[str, str]:
        missing = {}
        if not seen.controller:
            missing["controller"] = (
                "Ray Serve's controller does not answer. Requests are answered as before; "
                "replicas that die are replaced when it is back."
            )
        if seen.replicas is None:
            return missing | {"gateway": f"No gateway answers at {self.url}; Ray Serve starts another one."}
        engines = seen.replicas.get("decode", 0) + seen.replicas.get("prefill", 0)
        for role, number in self.wanted.items():
            there = int(seen.replicas.get(role, 0))
            if there < number:
                waits = MEANWHILE[role] if engines else "requests wait for it"
                others = "the others answer meanwhile" if there else waits
                missing[role] = f"{there} of {number} {role} replicas answer; Ray Serve starts another one, {others}."
        return missing


class _Question:
    """A call in a thread of its own, which does not keep the process from ending."""

    def __init__(self, status: Callable[[], Any]) -> None:
        self._status = status
        self.answer: Mapping[str, Any] | None = None  # Serve's applications
        self.done = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        try:
            self.answer = self._status().applications
        except Exception as error:  # Ray has many errors for an actor that is gone
            logger.debug("Serve's controller does not answer: %s", error)
        self.done.set()


class Looker:
    """Asks the endpoint and Serve's controller; neither may hold up the other."""

    def __init__(self, url: str, status: Callable[[], Any]) -> None:
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S, limits=httpx.Limits(max_keepalive_connections=0))
        self._status = status
        self._asked: _Question | None = None

    def look(self) -> Seen:
        try:
            text = self._http.get("/metrics").raise_for_status().text
            replicas = counters.by(counters.parse(text), SERVE_REPLICAS, "role")
        except httpx.HTTPError:
            replicas = None
        return Seen(replicas, *self._serve())

    def _serve(self) -> tuple[bool, str | None]:
        """Whether the controller answers, and why it gave up on the application, if it did. A call that is made while the
        controller is restarted may be answered late, so it is left waiting and not made again."""
        from strata.serving.runtime.app import NAME

        self._asked = self._asked or _Question(self._status)
        if not self._asked.done.wait(LOOK_S):
            return False, None
        applications, self._asked = self._asked.answer, None
        if applications is None:
            return False, None
        if NAME not in applications:
            return True, "somebody deleted it"
        failed = [one.message for one in applications[NAME].deployments.values() if one.status == "DEPLOY_FAILED"]
        return True, " ".join(failed[0].split())[-300:] if failed else None


def wanted(section: ServeSection) -> dict[str, int]:
    roles = {"gateway": section.gateways, "prefill": section.prefill.replicas, "decode": section.decode.replicas}
    return {role: number for role, number in roles.items() if number}


def until_lost(url: str, section: ServeSection, tell: Callable[[str], None]) -> None:
    """Returns by exception only: KeyboardInterrupt, or UserError when the endpoint is lost."""
    from ray import serve

    watch, looker = Watch(url, wanted(section), tell), Looker(url, serve.status)
    while True:
        if dead_part() == "raylet":  # nothing of the cluster lives on without it; a GCS is started again (`gcs.py`)
            raise ClusterDied(
                f"The endpoint at {url} is lost: Ray's node service (raylet) on this machine has died.",
                "Start it again with the same command; its port is free.",
            )
        watch.take(looker.look(), time.monotonic())
        time.sleep(LOOK_S)
