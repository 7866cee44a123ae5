"""Ranges of a plan's input numbers, whether they come from a command line, a recipe or a config.json.

The upper ends are far beyond what anybody runs. They keep the arithmetic finite and every answer within seconds: some of it
loops over stages, micro-batches, spares or divisors.
"""

from dataclasses import dataclass

from strata.platform.errors import UserError, shown


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; without `least` itself where `above`."""

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """NaN is in no range."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        return f"{'more than ' * self.above}{_plain(self.least)} to {_plain(self.most)}"

    def check(self, name: str, value: float, written: str | None = None) -> None:
        """`written`: the value as the user wrote it."""
        if value not in self:
            raise UserError(
                f"{name} {shown(value if written is None else written)} is out of range.",
                f"Give {name} a number in its range: {self}.",
            )


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:g}"


GPUS = Range(1, 10_000_000)
SEQUENCE = Range(1, 100_000_000)  # tokens
BATCH = Range(1, 1_000_000_000)  # sequences
TOKENS = Range(1, 1e18)
BYTES = Range(1, 1e18)  # also a second
PRICE = Range(0, 100_000, above=True)  # dollars of a GPU for an hour

# Of a layout, by its fields.
LAYOUT = {
    "data": GPUS,
    "tensor": Range(1, 65_536),
    "pipeline": Range(1, 256),
    "sequence": Range(1, 65_536),
    "context": Range(1, 65_536),
    "expert": Range(1, 65_536),
    "interleave": Range(1, 256),
    "zero": Range(0, 3),
    "micro_batch": Range(1, 1_000_000),
    "batch": BATCH,
}

# Of a model, by the fields of its shape, its experts and its latent attention.
SHAPE = {
    "layers": Range(1, 1000),
    "hidden": Range(1, 1_000_000),
    "heads": Range(1, 65_536),
    "kv_heads": Range(1, 65_536),
    "head_dim": Range(1, 65_536),
    "ffn": Range(1, 10_000_000),
    "vocab": Range(1, 100_000_000),
    "context": SEQUENCE,
}
EXPERTS = {
    "count": Range(1, 65_536),
    "top_k": Range(1, 65_536),
    "ffn": Range(1, 10_000_000),
    "shared_ffn": Range(0, 10_000_000),
    "dense_layers": Range(0, 1000),
}
LATENT = {
    "query_rank": Range(0, 1_000_000),
    "kv_rank": Range(1, 1_000_000),
    "plain_dim": Range(1, 65_536),
    "rotary_dim": Range(0, 65_536),
    "value_dim": Range(1, 65_536),
}

# Of a pipeline that `strata plan schedule` plays: all operations of every schedule are looked at one by one.
STAGES = LAYOUT["pipeline"]
MICRO_BATCHES = Range(1, 10_000)
OPERATIONS = 50_000  # stages x micro-batches x chunks
SECONDS = Range(0, 1_000_000)
SOME_SECONDS = Range(1e-9, 1_000_000)

# Of a run that fails.
SPARES = Range(0, 1_000_000)
DETECT = Range(0, 604_800)  # seconds: a week
REPAIR = Range(0, 8760)  # hours: a year
STEP = Range(1e-6, 10_000_000)
PREEMPTIONS = Range(0, 3600)
SPOT_PRICE = Range(0, 100, above=True)

# Of a load of requests.
RATE = Range(1e-6, 1_000_000)
CACHED = Range(0, 0.999)
VARIATION = Range(0, 100)
TTFT = Range(1e-6, 86_400)
ITL = Range(1e-6, 3600)
MAX_SEQUENCES = Range(1, 1_000_000)

TOP = Range(1, 200)
CHOICES = 32  # numbers of GPUs to choose from
DEADLINE = Range(0, 1_000_000, above=True)  # days
RANKS = Range(2, 10_000_000)
INSIDE = Range(1, 65_536)
PROCESSES = Range(2, 16)  # of `collectives --measure`, each with a torch of its own

# Of a simulated queue: its time grows with jobs and with nodes.
QUEUE_GPUS = Range(1, 262_144)
JOBS = Range(1, 1_000_000)
LOAD = Range(0.01, 10)
SEED = Range(0, 2**32)
NODE_GPUS = Range(1, 64)
BLOCK = Range(1, 4096)  # nodes
PAUSE = Range(0, 86_400)  # seconds of a checkpoint or a restart
AGEING = Range(0, 8760)  # hours

# Of a fleet: of its monitoring and its storage.
FLEET_GPUS = Range(1, 1_000_000)
RETENTION = Range(0, 3650, above=True)  # days
SCRAPE = Range(1, 3600)  # seconds
STALLED = Range(1e-6, 0.5)  # share of time
CHECKPOINTS = Range(1, 10_000)
