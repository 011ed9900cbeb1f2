from __future__ import annotations

import asyncio
import pickle
import socket as tcp
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distributed import handshake_monitor as module
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.kv_transfer.protocol.messages import Envelope, KVWorkerAnswer, KVWorkerCommand
from engine.wire.messages import Abort, Command, EngineUpdate, Notice
from engine.wire.token_delta import TokenBatch
from tests.refused import Refused

LIMIT_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def receiver(context: zmq.Context, host: str = "127.0.0.1") -> tuple[zmq.Socket, str]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.IPV6, ":" in host)
    return socket, f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_messages_arrive_in_order_at_the_receiver_that_they_were_sent_to(context, host):
    sockets = PushSockets(context)
    (one, one_address), (other, other_address) = receiver(context, host), receiver(context, host)
    for number in (b"1", b"2"):
        assert sockets.send(one_address, number)
        assert sockets.send(other_address, number * 2)
    assert [one.recv(), one.recv()] == [b"1", b"2"]
    assert [other.recv(), other.recv()] == [b"11", b"22"]


def test_what_is_no_address_is_refused_and_nothing_is_left_of_it(context):
    sockets = PushSockets(context)
    for _ in range(2):
        with pytest.raises(zmq.ZMQError):
            sockets.connect("nowhere")
    with pytest.raises(zmq.ZMQError):
        sockets.send("tcp://127.0.0.1", b"1")
    sockets.close()


def test_a_receiver_that_takes_nothing_loses_the_newest_messages_and_others_lose_none(context):
    sockets = PushSockets(context, {zmq.SNDHWM: 2})
    socket, address = receiver(context)
    socket.close()
    assert [sockets.send(address, b"%d" % number) for number in range(4)] == [True, True, False, False]
    other, other_address = receiver(context)
    assert sockets.send(other_address, b"1")
    assert other.recv() == b"1"


def test_only_sockets_that_were_not_used_for_long_are_forgotten(context, monkeypatch):
    sockets = PushSockets(context, {zmq.SNDHWM: 1})
    socket, address = receiver(context)
    socket.close()
    assert sockets.send(address, b"lost with its socket")
    sockets.forget_unused()
    assert not sockets.send(address, b"no room")
    monkeypatch.setattr("engine.distributed.sockets.FORGET_S", -1.0)
    sockets.forget_unused()
    assert sockets.send(address, b"a new socket has room")
    sockets.forget(address)
    sockets.forget(address)
    assert sockets.send(address, b"as this one has")


# -- a socket that hears many ----------------------------------------------------------------------------------


def puller(context: zmq.Context, key: ClusterKey | None = None, message: Any = Abort) -> PullSocket:
    return PullSocket(context, "127.0.0.1", message, name="test", key=key)


def next_of(puller: PullSocket) -> Any:
    """The next message that is one."""
    while True:
        assert puller.socket.poll(LIMIT_S * 1000), "no message came"
        for message in puller.messages():
            return message


def encoded(name: str) -> bytes:
    return msgspec.msgpack.encode(Abort(name))


def sender(context: zmq.Context, listener: PullSocket, name: str, key: ClusterKey | None = None) -> PushSockets:
    """One that has sent an Abort of that name; what it sent is lost with it."""
    sockets = PushSockets(context, key=key)
    assert sockets.send(listener.address, encoded(name))
    return sockets


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_messages_of_peers_with_the_clusters_key_are_received(context, host):
    key = ClusterKey.generate()
    listener = PullSocket(context, host, Abort, name="test", key=key)
    _member = sender(context, listener, "a", key)
    assert next_of(listener) == Abort("a")


@pytest.mark.parametrize("stranger", [None, ClusterKey.generate()], ids=["no key", "another key"])
def test_a_peer_without_the_clusters_key_is_not_heard_and_counted(context, monkeypatch, stranger):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    key, refused = ClusterKey.generate(), Refused("test", "unauthenticated")
    listener = puller(context, key)
    _stranger = sender(context, listener, "forged", stranger)
    while not refused.count:
        assert not list(listener.messages())
    _member = sender(context, listener, "true", key)
    assert next_of(listener) == Abort("true")


def test_a_peer_with_the_clusters_key_tells_nothing_to_a_listener_without_it(context):
    key = ClusterKey.generate()
    for listener in (puller(context), puller(context, ClusterKey.generate())):
        _member = sender(context, listener, "secret", key)
        assert not listener.socket.poll(100)


def test_a_peer_that_knows_half_of_a_key_is_a_stranger(context, monkeypatch):
    """The public half opens the door, so it is as secret as the other one."""
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    key, other, refused = ClusterKey.generate(), ClusterKey.generate(), Refused("test", "unauthenticated")
    listener = puller(context, key)
    _stranger = sender(context, listener, "forged", ClusterKey(other.public, key.secret))
    while not refused.count:
        assert not list(listener.messages())


@pytest.mark.parametrize("key", [None, ClusterKey.generate()], ids=["open", "guarded"])
def test_bytes_that_are_no_zmq_are_counted_and_end_nothing(context, monkeypatch, key):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    listener, refused = puller(context, key), Refused("test", "unauthenticated")
    host, port = listener.address.removeprefix("tcp://").split(":")
    for junk in (b"\xc1", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"):
        with tcp.create_connection((host, int(port))) as connection:
            connection.sendall(junk)
    while refused.count < 4:
        assert not list(listener.messages())
    _member = sender(context, listener, "a", key)
    assert next_of(listener) == Abort("a")


MESSAGES = [Command, Notice, TokenBatch, EngineUpdate, Envelope, KVWorkerCommand, KVWorkerAnswer]


@settings(max_examples=60)
@given(junk=st.lists(st.binary(max_size=40), min_size=1, max_size=10), types=st.sampled_from(MESSAGES))
def test_any_bytes_are_refused_or_a_message_and_what_comes_next_is_received(junk, types):
    with zmq.Context() as context:
        listener, refused, sockets = puller(context, message=types), Refused("test", "malformed"), PushSockets(context)
        for data in junk:
            assert sockets.send(listener.address, data)
        received = 0
        while received + refused.count < len(junk):
            assert listener.socket.poll(LIMIT_S * 1000), "a message is lost"
            received += len(list(listener.messages()))
        context.destroy(linger=0)


async def test_what_a_handler_cannot_do_with_is_refused_and_the_next_message_is_handed_over():
    context, received = zmq.asyncio.Context(), asyncio.Queue[str]()
    refused = {reason: Refused("test", reason) for reason in ("malformed", "unexpected", "unauthenticated")}

    def handle(message: Abort) -> None:
        if message.request_id == "bad":
            raise AssertionError("nobody sends that")
        received.put_nowait(message.request_id)

    key = ClusterKey.generate()
    listener = puller(context, key)
    serving = asyncio.create_task(listener.serve(handle))
    sync = zmq.Context(context)
    member, stranger = PushSockets(sync, key=key), PushSockets(sync)
    stranger.send(listener.address, encoded("forged"))
    for data in (b"\xc1", encoded("bad"), encoded("good")):
        member.send(listener.address, data)
    async with asyncio.timeout(LIMIT_S):
        assert await received.get() == "good"
        while not refused["unauthenticated"].count:
            await asyncio.sleep(0.002)
    assert (refused["malformed"].count, refused["unexpected"].count) == (1, 1)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for ends in (member, stranger):
        ends.close()
    context.destroy(linger=0)


def test_a_key_can_be_sent_and_does_not_get_into_a_log():
    key = ClusterKey.generate()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=ClusterKey) == key
    assert pickle.loads(pickle.dumps(key)) == key
    assert key.secret.decode() not in f"{key} {key!r} {[key]}"


def test_secrets_that_two_keys_derive_are_different():
    one, other = ClusterKey.generate(), ClusterKey.generate()
    assert len({one.derive(b"a"), one.derive(b"b"), other.derive(b"a")}) == 3
    assert one.derive(b"a") == msgspec.structs.replace(one).derive(b"a")
