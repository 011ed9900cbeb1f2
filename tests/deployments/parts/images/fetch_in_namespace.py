"""Fetches images in a network namespace of its own, whose loopback has public and other addresses. Prints what came.

python -m tests.deployments.parts.images.fetch_in_namespace PUBLIC OTHER...: adds these addresses, serves images at
each, and for each OTHER asks for it directly and by a redirect of PUBLIC's server. The output is one JSON line for
each: [address, how, the refusal or "loaded", whether its server was reached].
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import subprocess
import sys
from urllib.parse import urlsplit

from deployments.options.images import ImageConfig
from deployments.parts.images.media_connector import MediaConnector
from engine.multimodal.invalid_image import InvalidImage
from tests.deployments.parts.images.image_server import image_server
from tests.serve.serve_run import wait_until


async def fetch(url: str, allowed: tuple[str, ...]) -> str:
    connector = MediaConnector(ImageConfig(allowed_private_networks=allowed, fetch_timeout_s=60.0))
    try:
        await connector.load(url, "image")
    except InvalidImage as error:
        return error.limit
    return "loaded"


def is_routed(address: str) -> bool:
    """Whether the kernel sends to an address; for one of IPv6 that takes a moment after it was added."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex((address, 9)) == 0


async def until_reached(address: str, port: int | None) -> None:
    """Wait until a server accepts connections. On a busy machine an address of IPv6 can refuse the first ones."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(address, port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def main(public: str, others: list[str]) -> None:
    for command in ("link set lo up", *(f"addr add {address} dev lo nodad" for address in (public, *others))):
        subprocess.run(["ip", *command.split()], check=True)
    wait_until(lambda: all(map(is_routed, (public, *others))))
    async with image_server(public) as server:
        for address in (public, *others):
            async with image_server(address) as other:
                await until_reached(address, urlsplit(other.url).port)
                direct, redirect = f"{other.url}/image.png", f"{server.url}/redirect?to={other.url}/image.png"
                asked = [("direct", direct, ()), ("redirect", redirect, ()), ("allowed", redirect, (address,))]
                for how, url, allowed in asked:
                    other.paths.clear()
                    found = await fetch(url, allowed)
                    print(json.dumps([address, how, found, "/image.png" in other.paths]))


if __name__ == "__main__":
    given = [str(ipaddress.ip_address(address)) for address in sys.argv[1:]]
    asyncio.run(main(given[0], given[1:]))
