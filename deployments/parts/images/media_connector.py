"""Loads image files from URLs that clients send, without giving clients access to this server's network."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from typing import Any

import aiohttp
from yarl import URL

from deployments.options.images import ImageConfig
from deployments.parts.images.public_address import is_public, reached_address
from engine.errors import Described
from engine.multimodal.invalid_image import InvalidImage

REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"User-Agent": "manta", "Accept": "image/*", "Accept-Encoding": "identity"}
CHUNK_BYTES = 2**16


class MediaConnector:
    def __init__(self, config: ImageConfig):
        self._config = config
        self._allowed = [ipaddress.ip_network(network) for network in config.allowed_private_networks]

    async def load(self, url: str, field: str) -> bytes:
        """Return the file behind a data:, http: or https: URL. Raises InvalidImage, naming the image `field`."""
        if url[:5].lower() == "data:":
            return self._decode(url, field)
        if not self._config.fetch_urls:
            raise InvalidImage(
                field,
                url,
                "a data: URL, because this server loads no images from other URLs (ingress.images.fetch_urls)",
            )
        refused: list[str] = []
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await self._fetch(url, field, refused)
        except TimeoutError:
            limit = f"the URL of an image that is loaded within {self._config.fetch_timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # do not name the refused address: clients must not learn about internal networks
            limit = "a URL of a public address" if refused else f"a URL that can be loaded ({type(error).__name__})"
        raise InvalidImage(field, url, limit)

    def _decode(self, url: str, field: str) -> bytes:
        head, comma, data = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidImage(field, url, "a data: URL in base64 (data:image/png;base64,...)")
        self._check_size(len(data) * 3 // 4 - 2, field)
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidImage(field, url, f"valid base64 ({error})") from None

    async def _fetch(self, given: str, field: str, refused: list[str]) -> bytes:
        def new_socket(address: tuple[Any, ...]) -> socket.socket:
            """Return a socket for this address if it is public. The connection goes to this address, however its name
            resolves later."""
            family, kind, protocol, _, (host, *_) = address
            if not self._may_connect(host):
                refused.append(host)
                raise PermissionError("not a public address")
            return socket.socket(family, kind, protocol)

        connector = aiohttp.TCPConnector(socket_factory=new_socket, force_close=True)
        # auto_decompress: a response that is compressed anyway is not an image, and is never unpacked
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False, headers=HEADERS) as session:
            url = URL(given)
            for _ in range(self._config.max_redirects + 1):
                self._check_url(url, field)
                async with session.get(url, allow_redirects=False) as response:
                    if response.status in REDIRECTS and "Location" in response.headers:
                        url = url.join(URL(response.headers["Location"]))
                        continue
                    if response.status != 200:
                        raise InvalidImage(field, given, f"a URL that is answered with 200, not {response.status}")
                    return await self._read(response, field)
        limit = f"the URL of an image behind at most {self._config.max_redirects} redirects"
        raise InvalidImage(field, given, limit)

    async def _read(self, response: aiohttp.ClientResponse, field: str) -> bytes:
        self._check_size(response.content_length or 0, field)
        file = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            file += chunk
            self._check_size(len(file), field)
        return bytes(file)

    def _check_url(self, url: URL, field: str) -> None:
        domains = self._config.allowed_media_domains
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidImage(field, str(url), "a data:, http: or https: URL")
        if url.user is not None or url.password is not None:
            raise InvalidImage(field, str(url.with_user(None)), "a URL without a user and a password")
        if domains and url.host not in domains:
            limit = f"a URL of one of the hosts {', '.join(domains)} (ingress.images.allowed_media_domains)"
            raise InvalidImage(field, str(url), limit)

    def _check_size(self, size: int, field: str) -> None:
        if size > self._config.max_bytes:
            limit = f"an image of at most {self._config.max_bytes} bytes (ingress.images.max_bytes)"
            raise InvalidImage(field, Described(f"{size} or more"), limit)

    def _may_connect(self, host: str) -> bool:
        address = reached_address(host)
        return is_public(address) or any(address in network for network in self._allowed)
