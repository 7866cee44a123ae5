"""Builds a gateway's view of a model's engines."""

from strata.serving.adapters.entry import store
from strata.serving.adapters.registry import Adapters
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.pool import Pool
from strata.serving.gateway.prefix_routing import PrefixRouting
from strata.serving.gateway.readiness import Readiness
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.spec import GatewaySpec, directory_of
from strata.serving.tenants.gate import Gate
from strata.serving.transport.directory import Directory
from strata.serving.transport.peers import Peers


def main(spec: GatewaySpec, gateway: str) -> Pool:
    """Pool of the model that the endpoint was started with."""
    return build(spec, "", Telemetry(spec.model_id, gateway), None)


def build(spec: GatewaySpec, revision: str, telemetry: Telemetry, gate: Gate | None, origin: str = "") -> Pool:
    """`gate`: gets a queue for the pool; None: the pool uses the gate's own. `origin`: the model's first revision."""
    directory, secret = Directory(directory_of(spec.model_id, revision)), spec.network.secret
    routing = PrefixRouting(spec.max_sequences) if spec.routes_by_prefix else None
    decode = Peers(directory, spec.role, secret, joined=routing.follow if routing is not None else None)
    prefill = Peers(directory, "prefill", secret) if spec.disaggregated else None
    key = directory_of(spec.model_id, revision) if revision else ""
    return Pool(
        spec.names,
        decode,
        prefill,
        Admission(lambda: spec.capacity(len(decode.all())) - sum(peer.link.other_calls for peer in decode.all())),
        telemetry,
        Readiness(decode, prefill, directory if spec.warm_up else None, spec.role, spec.to_zero),
        routing,
        gate.open_queue(key, lambda: spec.slots(len(decode.all())), spec.max_queue) if gate is not None else None,
        key,
        _adapters(spec, origin, decode, prefill),
    )


def _adapters(spec: GatewaySpec, origin: str, decode: Peers, prefill: Peers | None) -> Adapters | None:
    if spec.adapters is None:
        return None
    directory = Directory(store(directory_of(spec.model_id, origin)))
    return Adapters(
        directory,
        lambda: [*decode.all(), *(prefill.all() if prefill is not None else [])],
        lambda: spec.names,
        spec.adapters,
    )
