"""Port reservations between concurrent processes, servers and foreign programs."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from strata.platform import ports
from strata.platform.errors import UserError

HOST = "127.0.0.1"


def test_error_names_the_port_in_use_and_a_free_port() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"Port {port} on {HOST} is in use") as error:
            ports.require_free(port, HOST, "serve.port")
    offered = int(error.value.fix.split("serve.port=")[1].rstrip("."))
    assert offered != port and ports.is_free(offered)
    ports.require_free(port, HOST, "serve.port")


def test_reserved_port_is_below_the_ephemeral_range_and_blocked_for_others() -> None:
    first, _ = (int(word) for word in ports.EPHEMERAL.read_text().split())
    with ports.reserve() as held:
        assert ports.FIRST <= held.port < first
        with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
            foreign.bind((HOST, held.port))
    with socket.socket() as later:
        later.bind((HOST, held.port))


def test_server_binds_its_reserved_port() -> None:
    with ports.reserve() as held, socket.create_server((HOST, held.port)):
        socket.create_connection((HOST, held.port)).close()


def test_reservation_outlives_its_server() -> None:
    """A restarted server binds the same port."""
    with ports.reserve() as held:
        socket.create_server((HOST, held.port)).close()
        socket.create_server((HOST, held.port)).close()


def _reserve_some(pipe: Connection) -> None:
    held = [ports.reserve() for _ in range(100)]
    pipe.send([one.port for one in held])
    pipe.recv()


@pytest.mark.slow
def test_concurrent_processes_reserve_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten processes in a nearly full range, so that they collide."""
    monkeypatch.setattr(ports, "FIRST", 31500)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(10):
        here, there = context.Pipe()
        process = context.Process(target=_reserve_some, args=(there,))
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        found = [port for pipe in pipes for port in pipe.recv()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(set(found)) == 1000
    for port in found:  # the kernel freed them when their processes were killed
        with socket.socket() as later:
            later.bind((HOST, port))


def test_ports_are_found_when_the_whole_range_is_ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "range"
    settings.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL", settings)
    with ports.reserve() as one, ports.reserve() as other:
        assert one.port != other.port
        with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
            foreign.bind((HOST, one.port))


CLAIM = """
import sys, time
from strata.platform import ports
try:
    claim = ports.claim(int(sys.argv[1]), "127.0.0.1", "serve.port")
except ports.UserError as error:
    print(error.cause, flush=True)
else:
    print("claimed", flush=True)
    time.sleep(60)
"""


def test_two_endpoints_cannot_share_a_port_before_either_listens() -> None:
    with ports.reserve() as held:  # the parent of an endpoint may reserve its port first
        processes = [
            subprocess.Popen([sys.executable, "-c", CLAIM, str(held.port)], stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        try:
            printed = []
            for process in processes:
                assert process.stdout
                printed.append(process.stdout.readline().strip())
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
        assert sorted(printed) == [f"Port {held.port} on {HOST} is in use.", "claimed"]
        ports.claim(held.port, HOST, "serve.port").release()  # a killed owner leaves nothing behind


def test_only_gateways_share_a_claimed_port() -> None:
    from strata.serving.gateway import http

    with ports.reserve() as held, ports.claim(held.port, HOST, "serve.port"):
        with socket.socket() as foreign, pytest.raises(OSError, match="in use"):
            foreign.bind((HOST, held.port))
        with http.listen(HOST, held.port), http.listen(HOST, held.port):
            socket.create_connection((HOST, held.port)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_a_separate_error(host: str) -> None:
    with pytest.raises(UserError, match=f"'{host}' is not an address of this machine"):
        ports.claim(8000, host, "serve.port")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may bind every port")
def test_privileged_port() -> None:
    with pytest.raises(UserError, match="cannot be used: Permission denied"):
        ports.claim(81, HOST, "serve.port")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.0.2.1", False),
        ("no-such-host.invalid", False),
    ],
)
def test_only_loopback_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert ports.is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_url_for_clients(host: str, expected: str) -> None:
    assert ports.url(host, 8000) == expected


def test_threads_reserve_different_ports() -> None:
    found: list[ports.Reservation] = []
    threads = [threading.Thread(target=lambda: found.append(ports.reserve())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.port for one in found}) == 20
    for one in found:
        one.release()
