"""Counter increases over restarts, and the merge of Prometheus texts."""

import httpx
import pytest
import virtual_time
from virtual_time import elapsed

from strata.platform.metrics import SERVE_PREFILLS, SERVE_REPLICAS, SERVE_RETRIES
from strata.serving.metrics import counters, exposition
from strata.serving.metrics.counters import Meter

TEXT = """# HELP strata_serve_retries_total Retries
# TYPE strata_serve_retries_total counter
strata_serve_retries_total{replica="b",reason="lost"} 3.0
strata_serve_retries_total{reason="lost",replica="a"} 4.0
strata_serve_retries_total{replica="a",reason="busy"} 10.0
strata_serve_prefills_total{where="local",reason="short"} 7.0
strata_serve_replicas{role="decode"} 1.0
vllm_other{reason="lost"} 100.0
strata_serve_other_total 100.0
"""


def series(replica: str) -> counters.Series:
    return SERVE_RETRIES.name, (("reason", "lost"), ("replica", replica))


def test_only_the_needed_series_are_parsed_with_sorted_labels() -> None:
    values = counters.parse(TEXT)
    assert len(values) == 5
    assert values[series("a")] == 4.0 and values[series("b")] == 3.0


def test_values_are_summed_by_labels() -> None:
    values = counters.parse(TEXT)
    assert counters.by(values, SERVE_RETRIES, "reason") == {"lost": 7.0, "busy": 10.0}
    assert counters.by(values, SERVE_RETRIES, "replica", "reason") == {"b lost": 3.0, "a lost": 4.0, "a busy": 10.0}
    assert counters.by(values, SERVE_PREFILLS, "where", "reason") == {"local short": 7.0}
    assert counters.by(values, SERVE_REPLICAS) == {"": 1.0}
    assert counters.by({}, SERVE_RETRIES, "reason") == {}


def test_increases_begin_with_the_first_reading_and_survive_restarts() -> None:
    meter = Meter(httpx.AsyncClient())
    meter.take({series("a"): 5.0}, 1.0)
    assert meter.increases == {} and (meter.at, meter.values) == (1.0, {series("a"): 5.0})
    meter.take({series("a"): 8.0, series("b"): 2.0}, 2.0)  # + 3; b is new: + 2
    meter.take({series("a"): 8.0}, 3.0)  # nothing; b is missing
    meter.take({series("a"): 1.0, series("b"): 6.0}, 4.0)  # a has restarted: + 1; b + 4
    assert meter.increases == {series("a"): 4.0, series("b"): 6.0}
    assert (meter.at, meter.values) == (4.0, {series("a"): 1.0, series("b"): 6.0})


@pytest.mark.parametrize(("status", "read"), [(200, True), (503, False)])
def test_a_reading_needs_an_answer(status: int, read: bool) -> None:
    async def test() -> None:
        transport = httpx.MockTransport(
            lambda request: httpx.Response(status, text=TEXT if request.url.path == "/metrics" else "")
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            meter = Meter(http)
            assert await meter.read() is read
            assert (meter.at, len(meter.values)) == ((virtual_time.START, 5) if read else (0.0, 0))

    virtual_time.run(test, counters)


def test_watching_reads_twice_a_second() -> None:
    async def test() -> None:
        moments: list[float] = []

        class Counting(Meter):
            async def read(self) -> bool:
                moments.append(elapsed())
                if len(moments) == 4:
                    raise EOFError
                return False

        with pytest.raises(EOFError):
            await Counting(httpx.AsyncClient()).watch()
        assert moments == pytest.approx([0, 0.5, 1.0, 1.5])

    virtual_time.run(test)


def test_merge_groups_the_samples_of_a_family() -> None:
    one = '# HELP a A\n# TYPE a gauge\na 1\na{x="y"} 2\n\n# HELP b B\n# TYPE b counter\nb{} 3\n'
    two = "# HELP a other\n# TYPE a other\na 4\n# TYPE c gauge\nc 5\n"
    assert exposition.merge([({"r": "1", "s": "t"}, one), ({}, two), ({"r": "2"}, "loose 6\n")]) == (
        'loose{r="2"} 6\n'
        '# HELP a A\n# TYPE a gauge\na{r="1",s="t"} 1\na{r="1",s="t",x="y"} 2\na 4\n'
        '# HELP b B\n# TYPE b counter\nb{r="1",s="t"} 3\n'
        "# TYPE c gauge\nc 5\n"
    )


@pytest.mark.parametrize(
    ("sample", "labelled"),
    [
        ("a 1", 'a{r="v"} 1'),
        ("a{} 1", 'a{r="v"} 1'),
        ('a{x="{ }"} 1', 'a{r="v",x="{ }"} 1'),
        ('a 1 # {trace="x"} 2', 'a{r="v"} 1 # {trace="x"} 2'),  # an exemplar
    ],
)
def test_labels_are_added_after_the_name(sample: str, labelled: str) -> None:
    assert exposition.merge([({"r": "v"}, sample)]) == f"{labelled}\n"


def test_label_values_are_escaped() -> None:
    assert exposition.merge([({"r": 'a"b\\c\nd'}, "x 1")]) == 'x{r="a\\"b\\\\c\\nd"} 1\n'
