"""Several gateways on one port: each accepts connections, and the rest continue after one has ended."""

import asyncio
import re
from pathlib import Path

from gateway_in_process import Gateway, running

from strata.platform import recipe_file
from strata.serving.runtime import app
from strata.serving.spec import EngineSpec, GatewaySpec, Network


async def answered_by(gateway: Gateway) -> str:
    """Name of the gateway that accepted a new connection to the port."""
    reader, writer = await gateway.connect(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    assert text.startswith("HTTP/1.1 200 OK")
    (name,) = set(re.findall(r'replica="(g-\d)"', text))
    return str(name)


def test_each_gateway_of_a_port_accepts_connections() -> None:
    async def test() -> None:
        async with running(name="g-1") as first:
            async with running(name="g-2", port=first.port) as second:
                assert second.port == first.port
                async with asyncio.timeout(10):
                    answered = set()
                    while answered != {"g-1", "g-2"}:  # the kernel chooses by a hash of the client's port
                        answered |= set(await asyncio.gather(*(answered_by(first) for _ in range(8))))
            assert {await answered_by(first) for _ in range(8)} == {"g-1"}, "the other one has ended"

    asyncio.run(test())


def test_recipe_sets_the_number_of_gateways() -> None:
    serve, network = recipe_file.load("laptop", ["serve.gateways=2"]).serve, Network.within(one_machine=True)
    prefill, decode = (EngineSpec.of(role, serve, Path("model"), "tiny", network) for role in ("prefill", "decode"))
    gateway = app.build(GatewaySpec.of(serve, "tiny", network), prefill, decode)._bound_deployment
    assert gateway.num_replicas == 2 and gateway.init_args[0].port == serve.port
