"""Answers about the server itself."""

from __future__ import annotations

from importlib.metadata import version

import msgspec

VERSION = version("manta-serve")


class Version(msgspec.Struct):
    version: str = VERSION


class ServerLoad(msgspec.Struct):
    """server_load: sequences of this ingress that wait or run."""

    server_load: int
