"""Request ids in the lines of Ray Serve's logger, as text and as JSON."""

import json
import logging

import pytest
from ray.serve._private.logging_utils import ServeFormatter

from strata.platform import recipe_file
from strata.serving.metrics import request_log
from strata.serving.runtime.deployments import gateways
from strata.serving.runtime.gateway_replica import GatewayReplica
from strata.serving.spec import GatewaySpec, Network


def test_lines_have_the_id_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, records = logging.getLogger(request_log.LOGGER), []
    before = list(logger.filters)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        request_log.install()
        logger.warning("outside of requests")
        token = request_log.current.set("mine")
        logger.warning("within one")
        request_log.current.reset(token)
    finally:
        logger.removeHandler(handler)
        logger.filters[:] = before
    outside, within = records
    assert not hasattr(outside, "request_id") and within.request_id == "mine"
    assert ServeFormatter("gateway", "g").format(within).endswith("mine -- within one")
    assert "mine" not in ServeFormatter("gateway", "g").format(outside)
    from ray._common.formatters import JSONFormatter

    line = json.loads(JSONFormatter().format(within))
    assert (line["request_id"], line["message"], line["levelname"]) == ("mine", "within one", "WARNING")


@pytest.mark.parametrize(("value", "json_"), [("json", True), ("JSON", True), ("text", False), ("", False)])
def test_format_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, json_: bool) -> None:
    monkeypatch.setenv(request_log.VARIABLE, value)
    assert bool(request_log.options()) == json_


def test_deployments_get_the_format_and_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(request_log.VARIABLE, "json")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    spec = GatewaySpec.of(recipe_file.load("laptop", []).serve, "tiny", Network.within(one_machine=True))
    deployment = gateways(GatewayReplica, spec, 1)
    assert deployment._deployment_config.logging_config["encoding"] == "JSON"
    environment = deployment.ray_actor_options["runtime_env"]["env_vars"]
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4318"
