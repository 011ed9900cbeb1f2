"""Ports that a server on this machine needs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

from cluster.cli.check.finding import Finding
from cluster.server_ports import KNOWN_PORTS, given_ports


def check_ports(host: str, port: int) -> Iterator[Finding]:
    """Check that the ports of a server are free. host, port: address of the API. Raises ConfigError."""
    yield check_port(host, port, "the API", "Stop the program that listens there, or choose another port with --port")
    if sys.platform == "linux":
        for name, number in given_ports().items():
            advice = f"Stop the program that listens there, or set {name} to another port"
            yield check_port("127.0.0.1", number, KNOWN_PORTS[name].use, advice)


def check_port(host: str, port: int, use: str, advice: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            return Finding("problem", "port", f"{port}, for {use}, is unavailable on {host}: {error.strerror}", advice)
    return Finding("ok", "port", f"{port}, for {use}, is free")
