"""Front end of a simulated replica: the event loop that parses requests, detokenizes and writes events.

It is a single server. Each request takes `request_s` of it, and each token `token_s`. The loop takes turns between connections:
requests that arrive together are parsed together and reach the engine at the same time, which keeps streams of equal length in
step. A request waits for the tokens of one step at most. The tokens of a step queue behind those of earlier steps and behind all
requests: an engine that is faster than its front end runs ahead, and a first token waits until everything before it is written.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Parsing(NamedTuple):
    """A request in the front end: the received work at which it is parsed, and its wait for tokens that came before it."""

    done: float
    wait_s: float


class FrontEnd:
    def __init__(self, request_s: float, token_s: float) -> None:
        self._request_s, self.token_s = request_s, token_s
        self._free_at = 0.0  # when everything in the queue is written
        # Work that a request would have received since the beginning, and its values at which requests are parsed.
        self._received = 0.0
        self._received_at = 0.0
        self._parsing: deque[float] = deque()
        self._counted = 0  # steps of the engine's current run whose tokens are in the queue

    def accepts(self, now: float, streams: int) -> Parsing:
        """Begins to parse a request beside `streams` streams."""
        self._receive(now)
        wait_s = min(max(0.0, self._free_at - now), self.token_s * streams)
        self._free_at = max(now, self._free_at) + self._request_s
        self._parsing.append(self._received + self._request_s)
        return Parsing(self._parsing[-1], wait_s)

    def parsed_at(self, now: float, request: Parsing) -> float:
        """Time at which a request is parsed if no other arrives before, or `now`. It waits `wait_s` besides."""
        self._receive(now)
        at, received, left = now, self._received, len(self._parsing)
        if request.done <= received:
            return now
        for done in self._parsing:
            if done > request.done:
                break
            at += (done - received) * left
            received, left = done, left - 1
        return round(at, 9)  # one time for requests that arrived together

    def _receive(self, now: float) -> None:
        """Divides the time until now among the requests."""
        while self._parsing:
            at = self._received_at + (self._parsing[0] - self._received) * len(self._parsing)
            if at > now:
                self._received += (now - self._received_at) / len(self._parsing)
                break
            self._received, self._received_at = self._parsing.popleft(), at
        self._received_at = now

    def stepped(self, began: float, seconds: Callable[[int], float], steps: int, streams: int) -> None:
        """Queues the tokens of the steps of a run that have ended: `steps` of them, `seconds(steps)` after `began`."""
        new = steps - self._counted
        if new <= 0:
            return
        first, last = began + seconds(self._counted + 1), began + seconds(steps)
        work = self.token_s * streams
        # Either the loop was never idle meanwhile, or it was idle before the last step or, if it is too slow, before the first.
        idle = last + work if new == 1 or work <= (last - first) / (new - 1) else first + new * work
        self._free_at = max(self._free_at + new * work, idle)
        self._counted = steps

    def run_ended(self) -> None:
        self._counted = 0

    def delivers(self, now: float) -> float:
        """Time at which clients have the tokens that are in the queue now."""
        return max(now, self._free_at) if self.token_s else now
