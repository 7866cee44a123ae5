"""Binds the gRPC server of every Ray Serve replica to the endpoint's address instead of all interfaces.

Serve binds it to `[::]`, and the server unpickles what it receives. It is unused here: requests do not pass through Serve.

Written for Ray 2.60. No longer needed when `ray.serve._private.replica` binds to the node's address; the test of this file
fails then. `tests/serving/runtime/test_reach.py` fails without the patch.
"""

from typing import Any


def listen_on(host: str | None) -> None:
    """Call it in a replica's constructor; Serve opens the port afterwards. None leaves Serve's default."""
    from ray.serve._private import replica

    if host is None:
        return
    add_port = replica.add_port_to_grpc_server

    def on_host(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", host)))

    replica.add_port_to_grpc_server = on_host
