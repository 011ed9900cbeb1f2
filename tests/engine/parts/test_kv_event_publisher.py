"""Sockets for KV events, and a whole engine behind them, read as vLLM's subscribers read."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import zmq

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.errors import ConfigError
from engine.options.kv_events import KVEventsConfig
from engine.parts.kv_events.publisher import KVEventSockets, shifted
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.kv_events import AllBlocksCleared
from engine.wire.sampling_params import SamplingParams
from tests import kv_event_reader
from tests.kv_event_reader import PATIENCE_MS, Subscriber


@pytest.fixture
def addresses(tmp_path):
    """Of events and replays; sockets of files have no ports that others may take."""
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replays"}


def options(addresses, **more) -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, **addresses, **more)


def test_a_subscriber_mirrors_the_prefix_cache_of_an_engine_through_evictions_a_gap_and_a_reset(addresses):
    events = {"enable_kv_cache_events": True, "topic": "kv@me@pocket", "use_int_block_hashes": False, **addresses}
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks_override=24,
        max_model_len=80,
        max_num_seqs=2,
        num_threads=1,
        kv_events_config=events,
    )
    core = build_engine(config)
    subscriber = Subscriber(**addresses, topic="kv@me@pocket")
    pool = core.scheduler.kv_cache.pool
    number = 0

    def answer(first: int) -> None:
        nonlocal number
        number += 1
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        core.add(
            GenerateRequest(request_id=f"r{number}", prompt=[5 + (first + i) % 400 for i in range(40)], params=params)
        )
        while core.has_work:
            core.step()

    try:
        answer(0)  # perhaps before the subscription has reached the engine: the gap at the start is one too
        subscriber.catch_up()
        assert subscriber.mirror.hashes() == set(pool.block_hashes())
        for first in (0, 50, 100, 0, 150):
            answer(first)
            subscriber.catch_up()
            assert subscriber.mirror.hashes() == set(pool.block_hashes())
        found = [type(event) for event in subscriber.mirror.events]
        assert kv_event_reader.BlockRemoved in found, "the pool is too large for this test"
        assert kv_event_reader.AllBlocksCleared not in found
        lose_a_batch(subscriber, lambda: answer(50 * number))
        assert subscriber.mirror.hashes() == set(pool.block_hashes())
        core.apply(CacheCleared())
        core.step()
        answer(3)
        subscriber.catch_up()
        assert kv_event_reader.AllBlocksCleared in [type(event) for event in subscriber.mirror.events]
        assert subscriber.mirror.hashes() == set(pool.block_hashes())
    finally:
        subscriber.close()
        core.close()


def lose_a_batch(subscriber: Subscriber, act: Callable[[], None]) -> None:
    """Act until batches come by subscription, then lose one of them and see it by the next."""
    while not subscriber.is_live():
        act()
    subscriber.catch_up()
    subscriber.replayed.clear()
    lost = subscriber.last + 1
    subscriber.lose = {lost}
    act()
    act()
    subscriber.read(lost + 1)
    assert subscriber.replayed[0] == lost


def joined(publisher: KVEventSockets, subscriber: Subscriber) -> None:
    """Send batches until the first one arrives: a subscription takes its time."""
    while not subscriber.is_live():
        publisher.send([AllBlocksCleared()])
    subscriber.catch_up()
    subscriber.replayed.clear()


def test_what_a_subscriber_lost_it_gets_again_in_order(addresses):
    publisher, subscriber = KVEventSockets(options(addresses)), Subscriber(**addresses)
    try:
        joined(publisher, subscriber)
        start = subscriber.last + 1
        subscriber.lose = {start + 1, start + 2}
        for _ in range(5):
            publisher.send([AllBlocksCleared()])
        subscriber.read(start + 4)
        assert subscriber.replayed[:2] == [start + 1, start + 2]
    finally:
        subscriber.close()
        publisher.close()


def test_only_the_newest_batches_are_kept_and_a_request_of_another_form_is_ignored(addresses):
    publisher, context = KVEventSockets(options(addresses, buffer_steps=3)), zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(addresses["replay_endpoint"])
    try:
        for _ in range(10):
            publisher.send([AllBlocksCleared()])
        asking.send_multipart([b"", b"short"])
        asking.send_multipart([b"", bytes(8)])
        numbers = []
        while not numbers or numbers[-1] >= 0:
            assert asking.poll(PATIENCE_MS)
            numbers.append(int.from_bytes(asking.recv_multipart()[2], "big", signed=True))
        assert numbers == [7, 8, 9, -1]
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_replay_is_whole_though_it_is_longer_than_a_socket_holds(addresses):
    publisher, subscriber = KVEventSockets(options(addresses)), Subscriber(**addresses)
    try:
        for _ in range(5000):
            publisher.send([AllBlocksCleared()])
        subscriber.catch_up()
        assert subscriber.replayed == list(range(5000))
    finally:
        subscriber.close()
        publisher.close()


def test_a_subscriber_that_does_not_read_loses_batches_and_nobody_waits_for_it(addresses):
    count = 20_000
    publisher = KVEventSockets(options(addresses, hwm=10, buffer_steps=2 * count))
    subscriber = Subscriber(**addresses)
    try:
        joined(publisher, subscriber)
        last = subscriber.last + count
        for _ in range(count):
            publisher.send([AllBlocksCleared()])
        live = 0
        while subscriber.is_live():
            subscriber.skip()
            live += 1
        assert live < count
        publisher.send([AllBlocksCleared()])
        subscriber.read(last + 1)
        assert len(subscriber.replayed) >= count
    finally:
        subscriber.close()
        publisher.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_engines_of_one_machine_take_the_next_free_ports():
    port = free_port()
    config = options({"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://127.0.0.1:{port + 1}"})
    first = KVEventSockets(config)
    second = KVEventSockets(config)
    try:
        bound = [p._pub.getsockopt_string(zmq.LAST_ENDPOINT) for p in (first, second)]
        assert len(set(bound)) == 2
    finally:
        second.close()
        first.close()


def test_without_an_endpoint_only_this_machine_can_listen():
    publisher = KVEventSockets(KVEventsConfig(enable_kv_cache_events=True))
    try:
        assert publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://127.0.0.1:")
    finally:
        publisher.close()


def test_an_address_that_is_none_ends_the_start_by_name():
    with pytest.raises(ConfigError, match=r"kv_events_config\.endpoint"):
        KVEventSockets(options({"endpoint": "nonsense://*"}))
    with pytest.raises(ConfigError, match=r"kv_events_config\.replay_endpoint"):
        KVEventSockets(options({"replay_endpoint": "nonsense://*"}))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"endpont": "x"}, "endpont"),
        ({"hwm": 0}, "hwm"),
        ({"hwm": "many"}, "hwm"),
        ({"topic": 3}, "topic"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events"),
        ({"publisher": "nats"}, "publisher"),
    ],
)
def test_wrong_options_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=f"kv_events_config.{named}"):
        EngineConfig(kv_events_config=wrong)


def test_events_without_a_prefix_cache_are_refused():
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    EngineConfig(kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}, enable_prefix_caching=False)


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_engines_that_share_experts_do_not_share_a_file_for_their_events(key):
    """The second would take it from the first."""
    shared = {"data_parallel_size": 2, "enable_expert_parallel": True}
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", key: "ipc:///tmp/events"}
    EngineConfig(kv_events_config=events)
    with pytest.raises(ConfigError, match=f"kv_events_config.{key} must be a TCP address"):
        EngineConfig(kv_events_config=events, **shared)


def test_ports_shift_and_files_do_not():
    assert shifted("tcp://*:5557", 2) == "tcp://*:5559"
    assert shifted("tcp://*:*", 2) == "tcp://*:*"
    assert shifted("ipc:///tmp/a:1", 2) == "ipc:///tmp/a:1"
