"""Address of the gRPC server that Ray Serve opens in every replica."""

import inspect

import pytest
from ray.serve._private import replica

from strata.serving.ray_patches import serve_ports


def test_the_server_is_bound_to_the_endpoints_address(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    def add_port(server: object, address: str) -> int:
        addresses.append(address)
        return 1234

    monkeypatch.setattr(replica, "add_port_to_grpc_server", add_port)
    serve_ports.listen_on(None)
    assert replica.add_port_to_grpc_server is add_port, "None leaves Serve's default"
    serve_ports.listen_on("127.0.0.1")
    assert replica.add_port_to_grpc_server(None, "[::]:0") == 1234
    assert addresses == ["127.0.0.1:0"]


def test_ray_still_needs_it() -> None:
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica), (
        "Ray Serve binds the gRPC server of a replica in another way: if it is the node's address, remove serve_ports.py; "
        "otherwise review it."
    )
