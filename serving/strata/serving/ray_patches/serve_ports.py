"""Puts the gRPC server that Ray Serve opens in every replica on the address that the endpoint's processes listen on.

Serve binds it to every interface, and it unpickles what it receives. Nobody calls it here: requests do not pass through Serve.

Written for Ray 2.60. No longer needed when `Replica._on_initialized` binds to the node's address;
`tests/serving/runtime/test_reach.py` fails without it.
"""

from typing import Any


def listen_on(host: str | None) -> None:
    """Call it in a replica's constructor, after which Serve opens the port. None: leave it to Serve."""
    from ray.serve._private import replica

    if host is None:
        return
    add_port = replica.add_port_to_grpc_server

    def on_host(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", host)))

    replica.add_port_to_grpc_server = on_host
