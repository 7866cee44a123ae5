"""NIXL side channel: vLLM's scheduler with our connector, without a model."""

import inspect
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler

from strata.serving.vllm_patches.side_channel import NixlConnector

HOST = "127.0.0.1"
PAYLOAD = NixlHandshakePayload(compatibility_hash="same", agent_metadata_bytes=b"agent")


def connector(port: int, host: str = HOST) -> NixlConnector:
    """Connector with only its side channel; the rest needs a model."""
    scheduler = NixlPullConnectorScheduler.__new__(NixlPullConnectorScheduler)
    scheduler.side_channel_host, scheduler.side_channel_port = host, port
    scheduler._nixl_handshake_listener_t, scheduler._stop_event = None, threading.Event()
    made = NixlConnector.__new__(NixlConnector)
    made.connector_scheduler, made.connector_worker = scheduler, None
    return made


@pytest.fixture
def started() -> Iterator[SimpleNamespace]:
    """Starts the connector after another process has bound its port, as during a model load."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        made = connector(port)
        starting = threading.Thread(target=made.set_xfer_handshake_metadata_pp_aware, args=({(0, 0): PAYLOAD},), daemon=True)
        starting.start()
        starting.join(timeout=10)
        assert not starting.is_alive(), "the engine waits for a listener that is gone"
        yield SimpleNamespace(scheduler=made.connector_scheduler, taken=port)
        made.connector_scheduler.shutdown()


def ask(port: int, message: bytes, limit_s: float = 5) -> list[bytes] | None:
    context = zmq.Context()
    try:
        asking = context.socket(zmq.REQ)
        asking.connect(f"tcp://{HOST}:{port}")
        asking.send(message)
        return list(asking.recv_multipart()) if asking.poll(1000 * limit_s) else None
    finally:
        context.destroy(linger=0)


def introduction(port: int) -> NixlHandshakePayload:
    answer = ask(port, msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
    assert answer is not None
    assert msgspec.msgpack.decode(answer[1]) <= time.perf_counter()
    return msgspec.msgpack.Decoder(NixlHandshakePayload).decode(answer[0])


@pytest.mark.slow
def test_engine_listens_on_another_port_if_its_port_is_in_use(started: SimpleNamespace) -> None:
    port = started.scheduler.side_channel_port
    assert port != started.taken
    assert introduction(port) == PAYLOAD


@pytest.mark.slow
@pytest.mark.parametrize(
    "message", [b"", b"\xc1garbage", msgspec.msgpack.encode((GET_META_MSG, 0, 7)), msgspec.msgpack.encode((b"what", 0, 0))]
)
def test_listener_survives_an_invalid_message(started: SimpleNamespace, message: bytes) -> None:
    assert ask(started.scheduler.side_channel_port, message, limit_s=0.2) is None
    assert introduction(started.scheduler.side_channel_port) == PAYLOAD


def test_unavailable_host_raises() -> None:
    with pytest.raises(zmq.ZMQError):
        connector(0, host="192.0.2.1").set_xfer_handshake_metadata_pp_aware({(0, 0): PAYLOAD})


def test_vllm_still_needs_it() -> None:
    """vLLM's listener thread fails on a port that is in use, without signalling the engine that waits for it."""
    ready, stop = threading.Event(), threading.Event()
    stop.set()
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(zmq.ZMQError):
            NixlPullConnectorScheduler._nixl_handshake_listener({}, ready, stop, HOST, taken.getsockname()[1])
    assert not ready.is_set(), "vLLM's engine now notices a port that is in use: review side_channel.py"
    source = inspect.getsource(NixlPullConnectorScheduler.set_xfer_handshake_metadata)
    assert "target=self._nixl_handshake_listener" in source and "ready_event.wait()" in source, (
        "vLLM starts its handshake listener in another way: review side_channel.py."
    )
