"""Units, thresholds and colours, the same for a quantity on every dashboard."""

from dataclasses import dataclass
from enum import StrEnum

from grafana_foundation_sdk.models import dashboard

GOOD, WATCH, BAD, PLAIN = "green", "orange", "red", "blue"


class Unit(StrEnum):
    """Unit names of Grafana."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    RATIO = "percentunit"
    PERCENT = "percent"
    COUNT = "short"
    PER_SECOND = "cps"
    REQUESTS_PER_SECOND = "reqps"
    TOKENS_PER_SECOND = "suffix: tok/s"
    NATS = "suffix: nats"
    STEPS = "suffix: steps"
    BURN = "suffix:x"
    WATTS = "watt"
    ENERGY = "suffix: kWh"
    DOLLARS = "currencyUSD"
    DOLLARS_PER_HOUR = "suffix: $/h"
    GPU_HOURS = "suffix: GPU-hours"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    NUMBER = "sci"
    NONE = "none"


@dataclass(frozen=True)
class Limits:
    """Warning and critical thresholds of a value. With `falling`, lower values are worse."""

    watch: float
    bad: float
    falling: bool = False

    def steps(self) -> list[dashboard.Threshold]:
        first, last = (BAD, GOOD) if self.falling else (GOOD, BAD)
        between, end = (self.bad, self.watch) if self.falling else (self.watch, self.bad)
        steps = [dashboard.Threshold(None, first), dashboard.Threshold(between, WATCH), dashboard.Threshold(end, last)]
        return steps if between != end else [steps[0], steps[2]]


FULL = Limits(watch=0.85, bad=0.95)  # memory, disk, KV cache, as a ratio
FULL_PERCENT = Limits(watch=85, bad=95)
HOT = Limits(watch=80, bad=88)  # °C; data-centre GPUs throttle from about 87
ANY = Limits(watch=1, bad=5)  # counts of events that should not happen
ANY_PER_SECOND = Limits(watch=0.001, bad=0.1)
FIRST_TOKEN = Limits(watch=1.0, bad=2.0)  # bad: the objective in the alert rules
INTER_TOKEN = Limits(watch=0.05, bad=0.1)
BURN = Limits(watch=1.0, bad=6.0)  # 6: the threshold of the slow burn-rate alert
MISSED = Limits(watch=0.005, bad=0.01)  # 0.01: the objective allows 1%
BUSY = Limits(watch=0.5, bad=0.1, falling=True)  # utilization of a GPU
IDLE = Limits(watch=0.1, bad=0.3)  # share of the GPUs of a team
ANSWERING = Limits(watch=1, bad=1, falling=True)
CHECKPOINT_AGE = Limits(watch=1800, bad=3600)

# Colours by the last word of a legend, the same on every dashboard. The last word is a label's value or the word itself.
ROLES = {"gateway": "purple", "decode": "blue", "prefill": "orange"}
PLACES = {"local": "blue", "remote": "orange"}
PHASES = {"data": "yellow", "forward": "blue", "backward": "purple", "optimizer": "green", "checkpoint": "red"}
QUANTILES = {"p50": "green", "p95": "orange", "p99": "red"}
COLOURS = {"{{role}}": ROLES, "{{where}}": PLACES, "{{phase}}": PHASES} | {word: {word: QUANTILES[word]} for word in QUANTILES}
