"""Connections that never become a request, opened again whenever they are closed. A program of its own.

Arguments: port, source address, how many say nothing, how many send a header a byte at a time. Prints a line once all
have been opened, and runs until it is killed.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from contextlib import suppress

HEADER = b"GET / HTTP/1.1\r\nx: " + b"a" * 10_000
STEP_S = 1.0  # between two bytes of a slow one


def connect(port: int, source: str) -> socket.socket:
    connection = socket.socket()
    connection.bind((source, 0))
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return connection


def main(port: int, source: str, silent: int, slow: int) -> None:
    poll, sockets, sent = select.epoll(), dict[int, socket.socket](), dict[int, int]()

    def open_one(is_slow: bool) -> None:
        connection = connect(port, source)
        sockets[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        if is_slow:
            sent[connection.fileno()] = 0

    for i in range(silent + slow):
        open_one(i >= silent)
    print("all have been opened", flush=True)
    step = time.monotonic()
    while True:
        for file, _ in poll.poll(max(0.0, step + STEP_S - time.monotonic())):
            poll.unregister(file)
            sockets.pop(file).close()
            open_one(sent.pop(file, None) is not None)
        if time.monotonic() >= step + STEP_S:
            step = time.monotonic()
            for file, at in sent.items():
                with suppress(OSError):  # not connected yet, or no more
                    sent[file] = at + sockets[file].send(HEADER[at : at + 1])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
