"""Encryption of blocks at rest, and the names of the encrypted blocks."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.distributed.cluster_key import ClusterKey

MAGIC = b"MKV1"  # of the format below
NONCE_BYTES, TAG_BYTES = 12, 16
OVERHEAD = len(MAGIC) + NONCE_BYTES + TAG_BYTES
MIN_KEY_BYTES = 32


class Unsealable(Exception):
    """Raised for a sealed block that is damaged, or that was sealed under another name or with another key."""


class Sealer:
    """Encrypts and authenticates blocks. A sealed block is MAGIC, nonce, and AES-256-GCM (NIST SP 800-38D) ciphertext
    with its tag.

    The tag covers the block's name too, so a file of another name, engine layout or rank is refused. The tag is also
    the checksum: a truncated or damaged file never opens.
    """

    def __init__(self, secret: bytes, scope: str):
        """secret: 32 bytes or more. scope: text that contains everything that determines the content of a block with a
        given name on this rank."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher, self._scope = AESGCM(_derive(secret, "blocks")), hashlib.blake2b(scope.encode()).digest()

    def seal(self, name: bytes, block: memoryview) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return MAGIC + nonce + self._cipher.encrypt(nonce, block, self._scope + name)

    def open(self, name: bytes, sealed: bytes) -> bytes:
        """Decrypt and return a block. Raises Unsealable."""
        from cryptography.exceptions import InvalidTag

        start = len(MAGIC) + NONCE_BYTES
        if len(sealed) < OVERHEAD or sealed[: len(MAGIC)] != MAGIC:
            raise Unsealable("not a sealed block")
        try:
            return self._cipher.decrypt(sealed[len(MAGIC) : start], memoryview(sealed)[start:], self._scope + name)
        except InvalidTag:
            raise Unsealable("damaged, or sealed with another key") from None


class BlockNames:
    """Names of blocks in the tiers. They depend on a key: with plain hashes, an attacker who guesses a prompt could
    verify the guess."""

    def __init__(self, secret: bytes):
        self._key = _derive(secret, "names")

    def of(self, group: int, block_hash: bytes) -> bytes:
        return hashlib.blake2b(block_hash, digest_size=16, key=self._key, salt=group.to_bytes(2, "little")).digest()

    def folder(self, scope: str) -> str:
        """Return the name of the folder for all blocks of one scope."""
        return hashlib.blake2b(scope.encode(), digest_size=8, key=self._key).hexdigest()


def read_key_file(path: str) -> bytes:
    """Return the content of a key file. Raises ConfigError unless only its owner can read it."""
    file = Path(path)
    try:
        found, secret = file.stat(), file.read_bytes()
    except OSError as error:
        raise ConfigError("kv_offloading_key_file", path, f"a file that can be read ({error.strerror})") from error
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError("kv_offloading_key_file", path, f"a file that only its owner may read (chmod 600 {path})")
    if len(secret) < MIN_KEY_BYTES:
        limit = f"a file of at least {MIN_KEY_BYTES} random bytes (head -c 32 /dev/urandom)"
        raise ConfigError("kv_offloading_key_file", path, limit)
    return secret


def choose_secret(key_file: str | None, cluster_key: ClusterKey | None) -> bytes:
    """Return the secret of this engine's tiers: the content of the key file if there is one, else a secret that lasts
    as long as the cluster's key, else a secret that lasts as long as this process."""
    if key_file is not None:
        return read_key_file(key_file)
    return secrets.token_bytes(MIN_KEY_BYTES) if cluster_key is None else cluster_key.derive(b"kv offloading")


def _derive(secret: bytes, purpose: str) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=purpose.encode()).digest()
