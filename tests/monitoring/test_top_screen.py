import io
import math

import pytest
from rich.console import Console

from strata.monitoring.gpu.health import Health
from strata.monitoring.gpu.nvml import Gpu, GpuProcess, Lost, Reading
from strata.monitoring.top.endpoint import Absent, Endpoint, Latency, Recently, Replica
from strata.monitoring.top.machine import Cores
from strata.monitoring.top.parts import duration, levels, milliseconds, sparkline
from strata.monitoring.top.runs import Progress
from strata.monitoring.top.screen import Snapshot

from .nvml_stand_in import recorded_cards

URL = "http://127.0.0.1:8000"
CORES = Cores((0.0, 0.5, 1.0, 0.5), 6 * 2**30, 8 * 2**30)
NO_GPU = Reading((), problem="NVML Shared Library Not Found")
LOSSES = tuple(2 + 7 * math.exp(-step / 80) for step in range(300))
RUN = Progress("laptop-3", 300, 1000, LOSSES, LOSSES[::30], 123456.0, 0.43, 7234.0, 125.0, 2.0)
RECENTLY = Recently(
    10.2,
    Latency(0.0123, 0.34),
    Latency(0.0023, 0.0171),
    12.34,
    45000.0,
    1034.0,
    {"local": 3.0, "remote": 9.0},
    {"queue-full": 2.0, "no-replica": 0.0},
    1.0,
)
REPLICAS = (
    Replica("decode-1", "decode", 0.93, 3.0, 1.0),
    Replica("decode-2", "decode", 0.2, 2.0, 0.0),
    Replica("gateway-1", "gateway", None, None, None),
    Replica("prefill-1", "prefill", 0.0, 0.0, 0.0),
)
SERVED = Endpoint(("tiny",), REPLICAS, 5.0, 1.0, RECENTLY)


def shown(
    gpus: Reading = NO_GPU,
    runs: tuple[Progress, ...] = (),
    endpoint: Endpoint | Absent = SERVED,
    width: int = 120,
    height: int | None = None,
) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    snapshot = Snapshot("here", gpus, CORES, runs, URL, endpoint)
    lines = console.render_lines(snapshot, console.options.update(width=width, height=height), pad=False)
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


def row(text: str, word: str) -> str:
    [found] = [line for line in text.splitlines() if word in line]
    return " ".join(found.split())


def test_empty_sections_have_a_note() -> None:
    text = shown(endpoint=Absent("Connection refused"))
    assert "no GPU: NVML Shared Library Not Found" in text
    assert "no run is training" in text
    assert f"no endpoint at {URL}: Connection refused" in text


def test_cores_and_memory_without_a_gpu() -> None:
    text = shown()
    assert row(text, "4 cores").endswith("50% ▁▅█▅")
    assert row(text, "memory").endswith("25% 6.0 of 8.0 GiB free")


def test_gpus_and_processes_with_actors() -> None:
    text = shown(recorded_cards().read())
    assert "cores" not in text
    serving, training = (line.split() for line in text.splitlines() if "H200" in line)
    assert serving[0] == "0" and "87%" in serving and "118.0/140.4" in serving and "512/700" in serving and "58" in serving
    assert training[-1] == "power", "throttled by its power limit"
    assert row(text, "strata:decode") == "0 48211 ServeReplica:strata:decode 86.0 GiB 61%"
    assert row(text, "RayTrainWorker") == "1 51902 RayTrainWorker 127.0 GiB 98%"


def test_card_without_values_and_lost_card() -> None:
    process = GpuProcess(7, "[/odd] name", None, None)
    without_values = Gpu(0, "unknown", "unknown", *[None] * 9, health=Health({}, {}, {}, {}), processes=(process,))
    text = shown(Reading((without_values,), (Lost(1, "GPU is lost"),)))
    assert row(text, "-/- GiB") == "0 unknown - -/- GiB - -"
    assert "GPU 1 does not respond: GPU is lost" in text
    assert row(text, "odd") == "0 7 [/odd] name - -", "brackets are not markup"


def test_a_run_is_two_lines() -> None:
    text = shown(runs=(RUN,))
    first = row(text, "laptop-3")
    assert first.endswith("300/1000 123,456 tokens/s MFU 43% 2.0 h left saved 2 min ago")
    second = row(text, "loss ")
    assert second.startswith(f"loss {LOSSES[-1]:.3f} █") and f"validation {LOSSES[270]:.3f} █" in second


def test_starting_and_stalled_runs() -> None:
    starting = Progress("new", 0, 100, (), (), None, None, None, None, None)
    stuck = Progress("stuck", 10, 100, LOSSES[:10], (), 1000.0, None, 100.0, None, 190.0)
    text = shown(runs=(starting, stuck))
    assert row(text, "new").endswith("0/100 starting")
    assert "10/100 no step for 3 min 1,000 tokens/s" in row(text, "stuck")


def test_the_endpoint() -> None:
    text = shown()
    assert "tiny: 2 decode, 1 gateway, 1 prefill, last 10 s" in text
    assert row(text, "TTFT") == "TTFT p50 12.3 ms p99 340 ms"
    assert row(text, "ITL") == "ITL p50 2.3 ms p99 17.1 ms"
    assert row(text, "requests") == "requests 12.3/s 5 in flight 1 queued"
    assert row(text, "refused") == "refused 2 rejected (queue-full 2) 1 failed"
    assert row(text, "tokens") == "tokens 1,034/s out 45,000/s in"
    assert row(text, "prefills") == "prefills 3 local 9 remote"
    assert row(text, "decode-1").endswith("KV 93% 3 running, 1 waiting")
    assert "gateway-1" not in text, "gateways have no KV cache"


def test_idle_endpoint_and_first_poll() -> None:
    rest = Recently(1.0, None, None, 0.0, 0.0, 0.0, {}, {}, 0.0)
    text = shown(endpoint=Endpoint(("tiny",), REPLICAS, 0.0, 0.0, rest))
    assert (row(text, "TTFT"), row(text, "refused")) == ("TTFT -", "refused 0 rejected 0 failed")
    assert "measuring" in shown(endpoint=Endpoint(("tiny",), REPLICAS, 0.0, 0.0, None))


@pytest.mark.parametrize("width", [30, 50, 72, 80, 110, 200])
def test_lines_fit_the_terminal_width(width: int) -> None:
    text = shown(recorded_cards().read(), (RUN,), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "TTFT" in text and "laptop-3" in text


def test_processes_are_hidden_in_a_low_terminal() -> None:
    reading = recorded_cards().read()
    whole = shown(reading, (RUN,))
    lines = len(whole.splitlines())
    assert "RayTrainWorker" in shown(reading, (RUN,), height=lines)
    low = shown(reading, (RUN,), height=lines - 1)
    assert "RayTrainWorker" not in low and "prefill-1" in low and len(low.splitlines()) < lines


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(1000)), 4) == "▁▃▆█"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0], 8) == "▁ █"
    assert sparkline([math.inf, math.nan], 8) == sparkline([], 8) == sparkline([1.0, 2.0], 0) == ""
    assert len(sparkline(LOSSES, 24)) == 24
    assert levels([0.0, 1.0, 2.0]) == "▁██"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (125, "2 min"), (7234, "2.0 h"), (36001, "10 h"), (200000, "2.3 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.00051, "0.5 ms"), (0.0171, "17.1 ms"), (0.34, "340 ms"), (2.345, "2.35 s")])
def test_latencies(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text
