"""Policy that stops drafting where it costs more than it saves. No clock of its own, no I/O.

Drafts make a step longer and give it several tokens per stream. On a small batch the device has time to spare; on a large one
the verified drafts compete with the tokens of other streams, and few of them are accepted if the text is hard to predict. So the
policy measures tokens per second with and without drafts for each class of batch sizes, uses the faster way, and tries the other
one again after a while, since the text changes. Tokens are the same either way.
"""

from dataclasses import dataclass

WINDOW = 24  # steps of a measurement
SETTLE = 2  # steps after a change that belong to neither way: drafts are verified in the step after the one that made them
FIRST_TRIAL = 256  # steps
RAREST_TRIAL = 8192
MARGIN = 1.03  # by which the other way must be faster


@dataclass
class _Window:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


class BatchClass:
    """Batches of similar size."""

    def __init__(self) -> None:
        self._better = True  # with drafts
        self._rate = 0.0  # tokens per second of the better way, in its last window
        self._trial = False
        self._unseen, self._wait = 0, FIRST_TRIAL  # steps since the last trial, and until the next one
        self._settled, self._window = 0, _Window()

    @property
    def drafts(self) -> bool:
        """The next step makes drafts."""
        return self._better != self._trial

    def add(self, drafts: bool, tokens: int, seconds: float) -> None:
        """Adds a step that only decoded."""
        if drafts != self.drafts:  # scheduled before the change
            return
        if self._settled < SETTLE:
            self._settled += 1
            return
        window = self._window
        window.steps, window.tokens, window.seconds = window.steps + 1, window.tokens + tokens, window.seconds + seconds
        if window.steps < WINDOW or window.seconds <= 0:
            return
        self._window = _Window()
        self._compare(window.tokens / window.seconds)

    def _compare(self, rate: float) -> None:
        if not self._trial:
            self._rate, self._unseen = rate, self._unseen + WINDOW
            if self._unseen >= self._wait:
                self._trial, self._settled = True, 0
            return
        changed = rate > self._rate * MARGIN
        if changed:
            self._better, self._rate = not self._better, rate
        else:
            self._settled = 0
        self._wait = FIRST_TRIAL if changed else min(2 * self._wait, RAREST_TRIAL)
        self._trial, self._unseen = False, 0


class Policy:
    """Classes by powers of two: batches of 1, 2, 3 and 4, 5 to 8, and so on."""

    def __init__(self) -> None:
        self._classes: dict[int, BatchClass] = {}

    def of(self, streams: int) -> BatchClass:
        return self._classes.setdefault((streams - 1).bit_length(), BatchClass())
