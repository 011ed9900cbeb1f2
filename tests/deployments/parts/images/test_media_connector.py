from __future__ import annotations

import asyncio
import base64
import re
import socket
from typing import Any

import pytest

from deployments.options.images import ImageConfig
from deployments.parts.images.media_connector import MediaConnector
from engine.errors import ConfigError
from engine.multimodal.invalid_image import InvalidImage
from tests.deployments.parts.images.image_server import IMAGE, ImageServer, image_server

LOCAL = ("127.0.0.0/8", "::1")
FIELD = "messages[0].content[1].image_url"


def load(path: str, **options: Any) -> tuple[bytes, ImageServer]:
    """path: of a URL of the local server, or a URL."""

    async def run() -> tuple[bytes, ImageServer]:
        async with image_server() as server:
            config = ImageConfig(**{"allowed_private_networks": LOCAL, **options})
            url = path.replace("SERVER", server.url)
            return await MediaConnector(config).load(url, FIELD), server

    return asyncio.run(run())


def refusal(path: str, **options: Any) -> str:
    with pytest.raises(InvalidImage, match=re.escape(f"{FIELD} must be")) as caught:
        load(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["SERVER/image.png", "SERVER/wrong-type", "SERVER/redirect?to=/image.png", "SERVER/redirect?to=SERVER/image.png"],
)
def test_an_image_is_loaded_from_its_url_whatever_the_header_calls_it(path):
    assert load(path)[0] == IMAGE


def test_an_image_in_a_data_url_is_decoded():
    assert load("data:image/png;base64," + base64.b64encode(IMAGE).decode())[0] == IMAGE
    assert load("DATA:;BASE64," + base64.b64encode(IMAGE).decode(), fetch_urls=False)[0] == IMAGE


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("SERVER/nothing", "200, not 404"),
        ("SERVER/broken", "200, not 500"),
        ("SERVER/circle", "behind at most 3 redirects"),
        ("SERVER/redirect?to=file:///etc/passwd", "a data:, http: or https: URL, got 'file:///etc/passwd'"),
        ("SERVER/redirect?to=ftp://pictures.example/a", "a data:, http: or https: URL"),
        ("SERVER/large", "at most 50000 bytes (ingress.images.max_bytes)"),
        ("file:///etc/passwd", "a data:, http: or https: URL"),
        ("gopher://127.0.0.1/", "a data:, http: or https: URL"),
        ("http://", "a data:, http: or https: URL"),
        ("/image.png", "a data:, http: or https: URL"),
        ("http://[::1", "a URL that can be loaded"),
        ("http://2130706433:1/", "a URL that can be loaded"),
        ("http://127.1:1/", "a URL that can be loaded"),
        ("http://me:secret@127.0.0.1/", "without a user and a password"),
        ("http://127.0.0.1:1/", "a URL that can be loaded"),
        ("data:image/png,abc", "a data: URL in base64"),
        ("data:image/png;base64", "a data: URL in base64"),
        ("data:image/png;base64,a§b", "valid base64"),
        ("data:image/png;base64,abcde", "valid base64"),
        ("data:image/png;base64," + "A" * 80_000, "at most 50000 bytes"),
    ],
)
def test_a_url_without_an_image_within_the_limits_is_refused_by_name(path, limit):
    message = refusal(path, max_bytes=50_000)
    assert limit in message and "secret" not in message


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "0x7f.1", "[::1]", "[::]", "[fe80::1]", "[fd00::1]", "[::ffff:127.0.0.1]",
        "[::ffff:a00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused_however_they_are_written(host):
    assert "a URL of a public address" in refusal(f"http://{host}:1/a.png", allowed_private_networks=())


def test_a_redirect_to_an_address_that_is_not_public_is_refused():
    message = refusal("SERVER/redirect?to=http://127.0.0.2:1/a.png", allowed_private_networks=("127.0.0.1",))
    assert "a URL of a public address" in message


def test_the_address_that_is_connected_to_is_the_one_that_was_checked(monkeypatch):
    """A name that resolves to something else the second time (DNS rebinding) is of no use."""
    resolve, answers = socket.getaddrinfo, iter(["93.184.216.34", "127.0.0.1"])

    def getaddrinfo(host, port, *args, **kwargs):
        return resolve(next(answers) if host == "pictures.example" else host, port, *args, **kwargs)

    connected = []

    async def sock_connect(loop, sock, address):
        connected.append(address[0])
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("asyncio.selector_events.BaseSelectorEventLoop.sock_connect", sock_connect)
    config = ImageConfig()
    for limit in ("a URL that can be loaded", "a URL of a public address"):
        with pytest.raises(InvalidImage, match=limit):
            asyncio.run(MediaConnector(config).load("http://pictures.example/a.png", FIELD))
    assert connected == ["93.184.216.34"]


def test_only_allowed_hosts_are_asked_also_behind_redirects():
    allowed = {"allowed_media_domains": ("127.0.0.1",)}
    assert load("SERVER/image.png", **allowed)[0] == IMAGE
    for path in ("http://pictures.example/a.png", "SERVER/redirect?to=http://pictures.example/a.png"):
        assert "a URL of one of the hosts 127.0.0.1 (ingress" in refusal(path, **allowed)


def test_a_server_that_says_nothing_is_given_up():
    assert "loaded within 0.05 s" in refusal("SERVER/silent", fetch_timeout_s=0.05)


def test_of_an_endless_answer_no_more_than_the_limit_is_kept():
    async def run() -> None:
        async with image_server() as server:
            config = ImageConfig(allowed_private_networks=LOCAL, max_bytes=200_000)
            with pytest.raises(InvalidImage, match="at most 200000 bytes"):
                await MediaConnector(config).load(f"{server.url}/endless", FIELD)
            assert server.sent < 2**24  # what sockets hold

    asyncio.run(run())


def test_nothing_is_loaded_where_urls_are_switched_off():
    assert "this server loads no images from other URLs (ingress.images.fetch_urls)" in refusal(
        "SERVER/image.png", fetch_urls=False
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_per_request": -1}, "max_per_request"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"fetch_timeout_s": 0.0}, "fetch_timeout_s"),
        ({"allowed_private_networks": ("10.0.0.1/8",)}, "allowed_private_networks"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, key):
    with pytest.raises(ConfigError, match=re.escape(f"ingress.images.{key}")):
        ImageConfig(**options)
