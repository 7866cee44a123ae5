"""Front end of a simulated replica: the event loop that parses requests, detokenizes and writes events.

It is a single server. Each request takes `request_s` of it, and each token `token_s`. The tokens of a step queue behind those of
earlier steps: an engine that is faster than its front end runs ahead, and the first token of a new request waits until everything
before it is written. A request itself waits for the requests before it, and for the tokens of one step at most, since the loop
takes turns between connections.
"""

from collections.abc import Callable


class FrontEnd:
    def __init__(self, request_s: float, token_s: float) -> None:
        self._request_s, self.token_s = request_s, token_s
        self._free_at = 0.0  # when everything in the queue is written
        self._parsed_at = 0.0  # when all requests are parsed
        self._counted = 0  # steps of the engine's current run whose tokens are in the queue

    def accepts(self, now: float, streams: int) -> float:
        """Time at which a request that arrives now has been parsed, beside `streams` streams."""
        begin = max(self._parsed_at, now + min(max(0.0, self._free_at - now), self.token_s * streams))
        self._parsed_at = begin + self._request_s
        self._free_at = max(now, self._free_at) + self._request_s
        return self._parsed_at

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
