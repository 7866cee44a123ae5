"""NIXL connector whose side channel binds a port at the moment it chooses one.

vLLM 0.29 takes the port of the side channel, where engines introduce themselves to each other, from
VLLM_NIXL_SIDE_CHANNEL_PORT, and binds it in a thread after the model is loaded. If something else has that port by then, the
thread ends, and the engine waits for it for ever: no error, no log line. A message that it cannot read ends the thread as
well, and no engine can introduce itself from then on. No longer needed when vLLM binds in the engine's main thread (port 0) and
survives such messages: `NixlBaseConnectorScheduler.set_xfer_handshake_metadata`.
"""

import logging
import threading
import time
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.utils.network_utils import make_zmq_path, make_zmq_socket

logger = logging.getLogger(__name__)

POLL_S = 1.0  # how soon the thread notices that its engine ends


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Under vLLM's own name, by which its configuration knows what NIXL can do."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Raises zmq.ZMQError where the host cannot be listened on: the engine ends with it."""
        scheduler = self.connector_scheduler
        if scheduler is not None and scheduler._nixl_handshake_listener_t is None:
            listener = Listener(scheduler.side_channel_host)
            scheduler.side_channel_port = listener.port  # each request that leaves here carries it
            scheduler._nixl_handshake_listener = listener.serve
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class Listener:
    """Answers other engines' handshakes."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        try:
            path = make_zmq_path("tcp", host, 0)
            self._socket: Any = make_zmq_socket(self._context, path, zmq.ROUTER, bind=True, linger=0)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def serve(
        self, encoded: dict[tuple[int, int], bytes], ready: threading.Event, stop: threading.Event, host: str, port: int
    ) -> None:
        """Until `stop` is set, in a thread of its own: vLLM's `_nixl_handshake_listener`, with its arguments."""
        ready.set()
        try:
            while not stop.is_set():
                if self._socket.poll(1000 * POLL_S):
                    self._answer(encoded)
        finally:
            self._context.destroy(linger=0)

    def _answer(self, encoded: dict[tuple[int, int], bytes]) -> None:
        try:
            identity, _, message = self._socket.recv_multipart()
            kind, pipeline_rank, tensor_rank = msgspec.msgpack.decode(message)
            if kind != GET_META_MSG:
                raise ValueError(f"unknown message {kind!r}")
            introduction = encoded[(pipeline_rank, tensor_rank)]
        except (ValueError, TypeError, KeyError) as error:  # msgspec's errors are ValueErrors
            logger.warning("A message on the side channel was ignored: %s", error)
            return
        # The other side estimates from it how far the two clocks are apart.
        now = msgspec.msgpack.encode(time.perf_counter())
        self._socket.send_multipart((identity, b"", introduction, now))
