from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from engine.distributed.sockets import PushSockets


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
