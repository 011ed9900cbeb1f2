"""Valid API keys, from the configuration and from a file that can change at any time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import InvalidApiKey
from engine.errors import ConfigError, Described

logger = logging.getLogger(__name__)

OPTION = "ingress.api_keys_file"
POLL_INTERVAL_S = 1.0  # between checks of the file's modification time
LINE = re.compile(r"(?P<name>[^\s:]+):(?P<digest>[0-9a-f]{64})(?::(?P<models>\S+))?")
RULE = "lines of `name:sha256 of the key in hexadecimal`, as `manta hash-key` prints them, maybe with `:model,model`"

_Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    models: frozenset[str] | None
    """Models and adapters that requests with this key may name; None for all."""


def hash_key(key: str) -> str:
    """Return the digest of a key as stored in the file. A plain SHA-256 is safe for long random keys only."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_line(name: str, key: str, models: str = "") -> str:
    """Return the line of a key for the file. models: names of the models that the key is limited to, with commas
    between them."""
    return ":".join(filter(None, (name, hash_key(key), models)))


class ApiKeys:
    """Keys from a file, one per line, and further keys that never change. Empty lines and comments (`#`) of the file
    are ignored.

    A change of the file is noticed within a second. If the file cannot be read then, the old keys stay valid and the
    failure is logged. An empty file admits no client.
    """

    def __init__(self, path: Path | None, lines: Iterable[str] = ()):
        """lines: further keys, each in the form of a line of the file. Raises ConfigError if the file cannot be read,
        if a line is wrong, or if there is no key."""
        self._path = path
        self._fixed = _keys("ingress.api_keys", lines)
        self._polled_at = time.monotonic()
        self._version: _Version | None = None
        self._keys: dict[str, ApiKey] = {}  # by digest
        self.managed: dict[str, ApiKey] = {}
        """Keys that were made while the server runs, by digest."""
        if path is None:
            return
        self._version, self._keys = _read(path)
        if not self._keys:
            raise ConfigError(OPTION, str(path), f"a file with at least one key: {RULE}")

    def find(self, key: str | None) -> ApiKey:
        """Return a key. Raises InvalidApiKey if it is missing or unknown."""
        self._reload_if_changed()
        if not key:
            raise InvalidApiKey("this server requires an API key: Authorization: Bearer <key>, or X-Api-Key: <key>")
        digest = hash_key(key)
        # compare with all keys, each in constant time, so that the time reveals nothing about them
        every = [*self._fixed.items(), *self._keys.items(), *self.managed.items()]
        matches = [found for known, found in every if hmac.compare_digest(known, digest)]
        if not matches:
            raise InvalidApiKey("the API key is unknown")
        return matches[0]

    def has_digest(self, digest: str) -> bool:
        """Return whether the configuration or the file has this key."""
        self._reload_if_changed()
        return digest in self._fixed or digest in self._keys

    def has_name(self, name: str) -> bool:
        """Return whether the configuration or the file has a key of this name."""
        self._reload_if_changed()
        return any(key.name == name for key in (*self._fixed.values(), *self._keys.values()))

    def models_of(self, name: str) -> frozenset[str] | None:
        """Return the models to which the keys of this name are limited; None for all models. Several keys may have this
        name."""
        self._reload_if_changed()
        every = (*self._fixed.values(), *self._keys.values(), *self.managed.values())
        limits = [key.models for key in every if key.name == name]
        return None if None in limits or not limits else frozenset().union(*filter(None, limits))

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._polled_at < POLL_INTERVAL_S:
            return
        self._polled_at = now
        try:
            if _version(self._path) == self._version:
                return
            self._version, self._keys = _read(self._path)
            logger.info("API keys reloaded keys=%d", len(self._keys))
        except (OSError, ConfigError) as error:
            logger.error("API keys stay as they were: %s", error)


def _version(path: Path) -> _Version:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[_Version, dict[str, ApiKey]]:
    """Return the file's version, and its keys by digest. Raises ConfigError, which quotes no part of a key."""
    try:
        version = _version(path)  # before reading, so that a change in between is noticed next time
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(OPTION, str(path), f"a text file that can be read ({type(error).__name__})") from None
    return version, _keys(f"{OPTION} {path}", lines)


def _keys(source: str, lines: Iterable[str]) -> dict[str, ApiKey]:
    """Return keys by digest. Raises ConfigError, which quotes no part of a key."""
    keys = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or not match[0].isprintable():
            raise ConfigError(source, Described(f"something else in line {number}"), RULE)
        models = match["models"]
        keys[match["digest"]] = ApiKey(match["name"], None if models is None else frozenset(models.split(",")))
    return keys
