"""NIXL connector that binds its handshake side channel to a free port.

vLLM reads the port of the side channel, on which engines exchange NIXL metadata, from VLLM_NIXL_SIDE_CHANNEL_PORT and binds it
in a thread after the model is loaded. If the port is in use by then, the thread ends, and the engine waits for it forever,
without an error or a log line. An unreadable message ends the thread as well, and no engine can connect from then on.

Written for vLLM 0.29. No longer needed when `NixlBaseConnectorScheduler.set_xfer_handshake_metadata` binds port 0 in the
engine's main thread and survives unreadable messages; the test of this file fails then.
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
from vllm.v1.utils import record_function_or_nullcontext

logger = logging.getLogger(__name__)

POLL_S = 1.0  # limit for the thread to notice the end of its engine
TRANSFER = "strata:kv transfer"  # range of a profile; without one it does nothing


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Has vLLM's class name, because vLLM's configuration checks it."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Raises zmq.ZMQError if the host cannot be bound, which ends the engine."""
        scheduler = self.connector_scheduler
        if scheduler is not None and scheduler._nixl_handshake_listener_t is None:
            listener = Listener(scheduler.side_channel_host)
            scheduler.side_channel_port = listener.port  # sent with every request for a KV transfer
            scheduler._nixl_handshake_listener = listener.serve
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        with record_function_or_nullcontext(TRANSFER):
            super().start_load_kv(*args, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        with record_function_or_nullcontext(TRANSFER):
            return super().get_finished(finished_req_ids)

    def wait_for_save(self) -> None:
        with record_function_or_nullcontext(TRANSFER):
            super().wait_for_save()


class Listener:
    """Answers handshakes of other engines."""

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
        """Serves until `stop` is set. Runs in a thread; replaces vLLM's `_nixl_handshake_listener` and has its arguments."""
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
            metadata = encoded[(pipeline_rank, tensor_rank)]
        except (ValueError, TypeError, KeyError) as error:  # msgspec's errors are ValueErrors
            logger.warning("Ignored an invalid message on the NIXL side channel: %s", error)
            return
        # The peer estimates the clock offset from it.
        now = msgspec.msgpack.encode(time.perf_counter())
        self._socket.send_multipart((identity, b"", metadata, now))
