"""Shared secret by which the processes of one cluster authenticate each other's sockets."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # an engine of one rank does without pyzmq
    import zmq


class ClusterKey(msgspec.Struct, frozen=True, array_like=True):
    """A CURVE key pair (CurveZMQ, https://rfc.zeromq.org/spec/26) that both ends of every connection use.

    Both halves are kept secret, so no list of admitted clients (ZAP) is needed: a handshake begins with a box sealed
    for the listener's public half, which never crosses the wire. All later traffic is encrypted.
    """

    public: bytes
    secret: bytes

    @classmethod
    def generate(cls) -> ClusterKey:
        import zmq

        return cls(*zmq.curve_keypair())

    def __repr__(self) -> str:
        return "ClusterKey(...)"  # it must not get into a log

    def guard_listener(self, socket: zmq.Socket[Any]) -> None:
        """Make the socket refuse every peer without this key. Call it before the socket binds."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret

    def guard_connector(self, socket: zmq.Socket[Any]) -> None:
        """Make the socket prove that it has this key, and refuse peers without it. Call it before the socket
        connects."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret

    def derive(self, data: bytes) -> bytes:
        """Return 32 secret bytes that only holders of this key can compute from `data`."""
        return hashlib.blake2b(data, digest_size=32, key=self.secret).digest()
