"""Choice of a decode replica for a simulated request, as `gateway.prefix_routing` makes it."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Literal

from strata.serving.routing.choice import Pick
from strata.serving.routing.kv import expected_wait
from strata.serving.routing.kv.expected_wait import Chosen, CostMeter
from strata.serving.routing.kv.prefix_map import PrefixMap
from strata.serving.simulation.engine import Engine, EngineSettings
from strata.serving.simulation.replica import Flight, Replica
from strata.serving.simulation.requests import Text
from strata.serving.simulation.routing import announcements
from strata.serving.simulation.routing.announcements import Announcements

Routing = Literal["kv", "least-busy", "oracle"]
_busy: Callable[[Replica], int] = attrgetter("busy")


class Chooser:
    """`oracle` looks into every cache at the time of the choice; `kv` knows what the replicas announced."""

    def __init__(self, oracle: bool, settings: EngineSettings, pick: Pick, clock: Callable[[], float]) -> None:
        self._oracle, self._settings, self._pick = oracle, settings, pick
        self._map = PrefixMap()
        self._names: dict[int, str] = {}
        self._queued: Counter[str] = Counter()  # tokens of prompts without a first token
        self.meter = CostMeter(clock)

    def join(self, name: str, engine: Engine) -> None:
        if not self._oracle:
            found = Announcements(self._map, self._settings.block_size)
            self._names[found.slot] = name
            engine.announce(found)

    def leave(self, replica: Replica) -> None:
        if replica.engine.announcements is not None:
            replica.engine.announcements.close()

    def choose(self, flight: Flight, replicas: Sequence[Replica]) -> Chosen[Replica] | None:
        text, tokens = flight.request.text, flight.request.prompt + flight.emitted
        size = self._settings.block_size
        if self._oracle:
            public = replicas[0].engine.public_names(text, tokens) if replicas else ()
            cached = {each.name: _cached_blocks(each, text, public, tokens) * size for each in replicas}
        else:
            names = announcements.points(text, (tokens - 1) // size, announcements.stride(size))
            cached = {self._names[slot]: count for slot, count in self._map.cached_tokens(names).items()}
        costs, most = self.meter.costs(), self._settings.max_sequences
        return expected_wait.choose(replicas, cached, self._queued, _busy, costs, most, flight.lost, self._pick)

    def sent(self, flight: Flight, chosen: Chosen[Replica]) -> None:
        flight.queued = (chosen.replica.name, max(1, flight.request.prompt + flight.emitted - chosen.cached))
        self._queued[chosen.replica.name] += flight.queued[1]

    def begun(self, flight: Flight) -> None:
        """A prompt is no longer queued: it has its first token, or its replica is lost."""
        if flight.queued is not None:
            name, tokens = flight.queued
            self._queued[name] -= tokens
            if not self._queued[name]:
                del self._queued[name]
            flight.queued = None


def _cached_blocks(replica: Replica, text: Text, public: Sequence[int], tokens: int) -> int:
    hits, _, own = replica.engine.look_up(text, public, tokens)
    return hits + own
