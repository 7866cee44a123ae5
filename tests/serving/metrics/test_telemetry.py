import random
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from strata.platform import metrics
from strata.serving.metrics import exposition
from strata.serving.metrics.telemetry import Gateway, Pictures, Replica

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Series:
    """All samples. Asserts that none is duplicated and that each family is contiguous."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type != "untyped" for family in families)
    samples = [sample for family in families for sample in family.samples]
    series = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(series) == len(samples)
    return series


def value(text: str, name: str, **labels: str) -> float:
    found = [v for (n, pairs), v in read(text).items() if n == name and labels.items() <= dict(pairs).items()]
    assert len(found) == 1, found
    return found[0]


def used_gateway(replica: str = "gateway-1") -> Gateway:
    gateway = Gateway("tiny", replica)
    gateway.request_ended("/v1/completions", 200, 0.25)
    gateway.first_token(0.012)
    gateway.inter_token_latencies([0.002, 0.003, 0.002])
    gateway.tokens(100, 4)
    gateway.queued(0.001)
    gateway.rejected("queue-full")
    gateway.retried("replica-lost")
    gateway.migrated("continued")
    gateway.disconnected()
    return gateway


def used_replica(role: str, replica: str) -> Replica:
    engine = Replica("tiny", role, replica)
    engine.prefilled("remote", "cheaper-there")
    engine.remote_prefill(0.05)
    engine.remote_prefill_failed()
    engine.load(3, 1, 0.25)
    engine.prefix_looked_up(100, 48)
    engine.kv_moved([4096, 8192], [0.001, 0.002])
    engine.kv_lost(1, 2)
    return engine


def used_pictures() -> Pictures:
    pictures = Pictures("tiny", "pictures-1")
    pictures.load(3, 1)
    pictures.batch_began(3)
    pictures.stepped(3, 0.25)
    pictures.stepped(2, 0.5)
    pictures.ended("completed", 2)
    pictures.ended("cancelled")
    pictures.workers_restarted()
    return pictures


def test_metrics_of_a_picture_replica() -> None:
    text = used_pictures().text()
    assert value(text, "strata_serve_pictures_running") == 3 and value(text, "strata_serve_pictures_waiting") == 1
    assert value(text, "strata_serve_picture_batches_total") == 1 and value(text, "strata_serve_pictures_batched_total") == 3
    assert value(text, "strata_serve_picture_steps_total") == 5
    assert value(text, "strata_serve_picture_step_seconds_count") == 2
    assert value(text, "strata_serve_picture_step_seconds_sum") == 0.75
    outcomes = {"completed": 2, "cancelled": 1, "failed": 0}
    assert all(value(text, "strata_serve_pictures_total", outcome=name) == number for name, number in outcomes.items())
    assert value(text, "strata_serve_worker_restarts_total", role="pictures", replica="pictures-1") == 1


def test_every_serving_metric_is_exported_with_its_name_and_model() -> None:
    texts = (used_gateway().text(), used_replica("decode", "decode-1").text(), used_pictures().text())
    text = exposition.merge([({}, each) for each in texts])
    named = {family.name for family in text_string_to_metric_families(text)}
    assert named == {metric.exported.removesuffix("_total") for metric in metrics.SERVING}
    assert all(dict(pairs)["model"] == "tiny" for _, pairs in read(text))


def test_metrics_of_a_gateway() -> None:
    gateway = used_gateway()
    text = gateway.text()
    assert value(text, "strata_serve_requests_total", route="/v1/completions", status="200") == 1
    assert value(text, "strata_serve_request_seconds_sum", route="/v1/completions") == 0.25
    assert value(text, "strata_serve_first_token_seconds_bucket", le="0.015") == 1
    assert value(text, "strata_serve_first_token_seconds_bucket", le="0.01") == 0
    assert value(text, "strata_serve_inter_token_seconds_count") == 3
    assert value(text, "strata_serve_inter_token_seconds_bucket", le="0.002") == 2, "a bound belongs to its own bucket"
    assert value(text, "strata_serve_prompt_tokens_total") == 100
    assert value(text, "strata_serve_generated_tokens_total") == 4
    assert value(text, "strata_serve_migrations_total", outcome="continued") == 1
    assert value(text, "strata_serve_migrations_total", outcome="refused") == 0
    assert value(text, "strata_serve_client_disconnects_total") == 1


def test_failed_requests_leave_the_in_flight_gauge() -> None:
    gateway = Gateway("tiny", "gateway-1")
    try:
        with gateway.in_flight(), gateway.in_queue():
            assert value(gateway.text(), "strata_serve_requests_in_flight") == 1
            assert value(gateway.text(), "strata_serve_requests_queued") == 1
            raise RuntimeError
    except RuntimeError:
        pass
    assert value(gateway.text(), "strata_serve_requests_in_flight") == 0
    assert value(gateway.text(), "strata_serve_requests_queued") == 0


def test_metrics_of_a_replica() -> None:
    text = used_replica("decode", "decode-1").text()
    assert value(text, "strata_serve_prefills_total", where="remote", reason="cheaper-there") == 1
    assert value(text, "strata_serve_prefills_total", where="local", reason="short") == 0
    assert value(text, "strata_serve_kv_cache_usage", role="decode", replica="decode-1") == 0.25
    assert value(text, "strata_serve_sequences_running") == 3
    assert value(text, "strata_serve_sequences_waiting") == 1
    assert value(text, "strata_serve_prefix_cache_hit_tokens_total") == 48
    assert value(text, "strata_serve_kv_transfer_bytes_total") == 12288
    assert value(text, "strata_serve_kv_transfer_seconds_count") == 2
    assert value(text, "strata_serve_kv_transfer_failures_total") == 1
    assert value(text, "strata_serve_kv_expired_total") == 2


def test_histograms_equal_those_of_prometheus_client() -> None:
    rng = random.Random(5)
    gaps = [rng.choice((rng.expovariate(200), rng.choice(metrics.ITL_BUCKETS), 0.0, 100.0)) for _ in range(1000)]
    registry = CollectorRegistry()
    metric = metrics.SERVE_INTER_TOKEN
    theirs = Histogram(metric.name, metric.help, registry=registry, buckets=metric.buckets)
    gateway = Gateway("tiny", "gateway-1")
    for gap in gaps:
        theirs.observe(gap)
    gateway.inter_token_latencies(gaps[:600])
    gateway.inter_token_latencies(gaps[600:])
    gateway.inter_token_latencies([])
    text = gateway.text()
    for bound in metric.buckets:
        expected = registry.get_sample_value(f"{metric.name}_bucket", {"le": str(bound)})
        assert value(text, f"{metric.name}_bucket", le=str(bound)) == expected
    assert value(text, f"{metric.name}_bucket", le="+Inf") == 1000
    assert abs(value(text, f"{metric.name}_sum") - sum(gaps)) < 1e-6


def test_unknown_routes_share_one_series() -> None:
    gateway = Gateway("tiny", "gateway-1")
    gateway.request_ended("/v1/completions", 200, 0.1)
    before = len(read(gateway.text()))
    for number in range(100):
        gateway.request_ended(f"/{number}", 404, 0.001)
    # One counter, and one histogram with its sum, its count and its last bucket.
    assert len(read(gateway.text())) == before + 1 + len(metrics.LATENCY_BUCKETS) + 3


def test_metrics_of_several_processes_are_merged() -> None:
    gateways = [used_gateway(name).text() for name in ("gateway-1", "gateway-2")]
    named = (("decode", "decode-1"), ("decode", "decode-2"), ("prefill", "prefill-1"))
    engines = [used_replica(role, name).text() for role, name in named]
    text = exposition.merge([({}, part) for part in (*gateways, *engines)])
    series = read(text)
    assert text.count("# TYPE strata_serve_kv_cache_usage gauge\n") == 1
    replicas = [dict(pairs)["role"] for name, pairs in series if name == "strata_serve_replicas"]
    assert sorted(replicas) == ["decode", "decode", "gateway", "gateway", "prefill"]
    assert sum(v for (name, _), v in series.items() if name == "strata_serve_prompt_tokens_total") == 200


def test_labels_are_added_to_every_sample() -> None:
    part = '# HELP a_total with {braces} and \\n\n# TYPE a_total counter\na_total 1.0\na_total{x="} \\" {"} 2.0\n'
    other = "# HELP b B\n# TYPE b gauge\nb{} NaN\n"
    text = exposition.merge([({"replica": 'q"\\\n'}, part), ({"replica": "p", "role": "r"}, other), ({"replica": "p"}, part)])
    assert text.count("# HELP a_total ") == 1
    series = read(text)
    assert {dict(pairs).get("replica") for _, pairs in series} == {'q"\\\n', "p"}
    assert series["a_total", frozenset({("replica", "p"), ("x", '} " {')})] == 2.0
    assert ("b", frozenset({("replica", "p"), ("role", "r")})) in series


def test_merge_of_nothing_is_empty() -> None:
    assert exposition.merge([]) == ""
    assert exposition.merge([({"a": "b"}, "")]) == ""


def test_gateway_metrics_import_neither_vllm_nor_torch_nor_ray() -> None:
    probe = (
        "import sys, strata.serving.metrics.telemetry, strata.serving.metrics.exposition, strata.serving.routing.kv.prefix_map;"
        "assert not {'vllm', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, cwd=Path(__file__).parent)
