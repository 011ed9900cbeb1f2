"""Redirects and slow servers, over real sockets: in a network namespace of its own, and on loopback."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from deployments.options.images import ImageConfig
from deployments.parts.images.media_connector import MediaConnector
from engine.multimodal.invalid_image import InvalidImage
from tests.deployments.parts.images.image_server import IMAGE

PUBLIC = "93.184.216.34"
OTHERS = ["168.63.129.16", "192.0.0.192", "10.0.0.1", "fec0::1", "64:ff9b:1::a00:1", "2606:2800:220:1:0:5efe:a00:1"]
IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]
TIMEOUT_S = 0.5


def can_make_namespaces() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run([*IN_NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="this machine lets nobody make a network namespace")
def test_no_redirect_of_a_public_server_leads_to_an_address_that_is_not_public():
    module = "tests.deployments.parts.images.fetch_in_namespace"
    command = [*IN_NAMESPACE, sys.executable, "-m", module, PUBLIC, *OTHERS]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()
    found = [tuple(json.loads(line)) for line in lines]
    expected = [(PUBLIC, how, "loaded", True) for how in ("direct", "redirect", "allowed")]
    for address in OTHERS:
        expected += [(address, how, "a URL of a public address", False) for how in ("direct", "redirect")]
        expected += [(address, "allowed", "loaded", True)]
    assert found == expected


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def a_byte_of_the_header_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nServer: ")
    while True:
        writer.write(b"s")
        await asyncio.sleep(TIMEOUT_S / 20)


async def a_byte_of_the_file_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(IMAGE))
    for at in range(len(IMAGE)):
        writer.write(IMAGE[at : at + 1])
        await asyncio.sleep(TIMEOUT_S / 20)


async def a_redirect_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(TIMEOUT_S * 0.7)
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n")


async def nothing_at_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def refusal(url: str) -> str:
    """Return why an image at `url`, on loopback, is refused, which takes no longer than the limit allows."""
    config = ImageConfig(allowed_private_networks=("127.0.0.0/8",), fetch_timeout_s=TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(InvalidImage) as caught:
        asyncio.run(asyncio.wait_for(MediaConnector(config).load(url, "image"), 20))
    assert time.monotonic() - began >= TIMEOUT_S
    return caught.value.limit


@pytest.mark.parametrize(
    "answer",
    [a_byte_of_the_header_at_a_time, a_byte_of_the_file_at_a_time, a_redirect_at_a_time, nothing_at_all],
    ids=lambda answer: answer.__name__,
)
def test_a_server_is_given_up_when_the_time_is_over_however_busy_it_looks(answer: Answer):
    async def until_it_is_given_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError, ConnectionError):
            await answer(reader, writer)

    async def run() -> str:
        async with await asyncio.start_server(until_it_is_given_up, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await asyncio.to_thread(refusal, f"http://{host}:{port}/image.png")

    assert asyncio.run(run()) == f"the URL of an image that is loaded within {TIMEOUT_S} s"


def test_a_host_that_accepts_no_connection_is_given_up_when_the_time_is_over():
    """Its queue of connections is full, so that the kernel drops all further ones without a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(server.getsockname())
        try:
            host, port = server.getsockname()
            assert refusal(f"http://{host}:{port}/image.png").endswith(f"within {TIMEOUT_S} s")
        finally:
            for each in waiting:
                each.close()
