"""Finds listening sockets that other machines could reach."""

import ipaddress
import socket

import psutil


def reachable_from_outside(root: psutil.Process) -> list[str]:
    """Listening TCP and UDP sockets of a process and its descendants that are not on a loopback address."""
    found, seen = [], 0
    for process in [root, *root.children(recursive=True)]:
        try:
            title, connections = " ".join(process.cmdline()), process.net_connections(kind="inet")
        except psutil.Error:
            continue  # the process has ended
        for connection in connections:
            datagrams = connection.type == socket.SOCK_DGRAM
            if connection.status == psutil.CONN_LISTEN or (datagrams and not connection.raddr):
                seen += 1
                if not _loopback(connection.laddr.ip):
                    found.append(f"{connection.laddr.ip}:{connection.laddr.port} {'udp' if datagrams else 'tcp'} {title[:80]}")
    assert seen, "no socket was found at all"
    return found


def _loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
