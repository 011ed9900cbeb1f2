"""Two real channels that speak over ZMQ, with workers that are modelled or real. Nothing here depends on time but the
deadline of a test that fails."""

import threading
import time

import msgspec
import pytest
import torch
import zmq

from engine.errors import EngineUnavailable
from engine.kv_transfer.channel import HandoffChannel
from engine.kv_transfer.protocol.messages import Envelope, Released
from engine.kv_transfer.protocol.receive_state import hash_prompt
from engine.kv_transfer.transport.head_map import HeadShard
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.options.handoff import HandoffConfig
from engine.wire.handoff import (
    AcceptPrefill,
    CancelHandoff,
    Closed,
    Failed,
    FinishPrefill,
    FirstToken,
    Noted,
    OpenHandoff,
    Received,
    RefusePrefill,
    ReportProgress,
)
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.engine.kv_transfer.fake_worker import FakeKVWorker
from tests.refused import Refused

WAIT_S = 60.0
BLOCK = 4
PROMPT = list(range(1, 15))  # 3 blocks and a half
CONFIG = HandoffConfig(role="decode", lease_s=60.0, progress_s=30.0, accept_s=30.0)
HASTY = HandoffConfig(role="decode", heartbeat_s=0.02, lease_s=0.2, progress_s=0.1, accept_s=10.0)


class Engine:
    """A channel, its workers, and what a step loop does with them."""

    def __init__(self, name, workers, config=CONFIG):
        self.workers, self.told = workers, []
        self.woken, self.noted = threading.Event(), []
        self.channel = HandoffChannel(
            config,
            engine_id=name,
            host="127.0.0.1",
            workers=workers,
            block_size=BLOCK,
            wake=self.woken.set,
        )

    def wait_for_event(self):
        """The next one."""
        deadline = time.monotonic() + WAIT_S
        while not self.told:
            assert self.woken.wait(deadline - time.monotonic()), "no event came"
            self.woken.clear()
            for event in self.channel.events():
                (self.noted if isinstance(event, Noted) else self.told).append(event)
        return self.told.pop(0)

    def wait_until_broken(self):
        while True:
            assert self.woken.wait(WAIT_S), "it did not break"
            self.woken.clear()
            try:
                self.channel.events()
            except EngineUnavailable as error:
                return str(error)

    def wait_for_stats(self, condition):
        deadline = time.monotonic() + WAIT_S
        while not condition(self.channel.stats()):
            assert time.monotonic() < deadline, self.channel.stats()
            self.woken.wait(0.005)

    def close(self):
        self.channel.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def engines():
    """Makes engines that are closed at the end."""
    made = []

    def make(name, workers=None, config=CONFIG):
        made.append(Engine(name, [FakeKVWorker()] if workers is None else workers, config))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def remote_request_for(decode, handoff_id="h", address=None):
    peer = decode.channel.peer
    return RemoteRequest(
        handoff_id=handoff_id,
        request_id="r",
        attempt=1,
        token_ids=PROMPT,
        num_prompt=len(PROMPT),
        params=SamplingParams(),
        seed=0,
        cache_salt="",
        skip=0,
        fingerprint="f",
        decode=peer if address is None else Peer(peer.engine_id, address, peer.epoch),
    )


def accepted(decode: Engine, prefill: Engine) -> RemoteRequest:
    """Return a request that the decode engine has opened, and that the prefill engine computes."""
    remote_request = remote_request_for(decode)
    decode.channel.submit(OpenHandoff(remote_request, [20, 21, 22, 23]))
    prefill.channel.submit(AcceptPrefill(remote_request))
    return remote_request


def first_of(remote_request):
    return FirstToken(7, None, hash_prompt(remote_request, BLOCK), 0)


def test_kv_travels_between_two_engines_while_prefill_computes(engines):
    decode, prefill = engines("d", [FakeKVWorker(rank) for rank in range(2)]), engines("p")
    remote_request = accepted(decode, prefill)
    source = prefill.workers[0].memory
    source.update({5: "one", 6: "two"})
    prefill.channel.submit(ReportProgress("h", 8, [5, 6]))
    for worker in decode.workers:
        assert worker.has_read.wait(WAIT_S)
    source.update({7: "three", 8: "four"})
    prefill.channel.submit(ReportProgress("h", 14, [5, 6, 7, 8]))
    prefill.channel.submit(FinishPrefill("h", first_of(remote_request)))
    assert decode.wait_for_event() == Received("h", first_of(remote_request))
    assert prefill.wait_for_event() == Closed("h", "released")
    for worker in decode.workers:
        assert worker.memory == {20: "one", 21: "two", 22: "three", 23: "four"}
    stats = decode.channel.stats()
    assert stats.results == {"received": {"": 1}}
    assert stats.bytes_read == {"fake": 8}
    assert {"accept", "compute", "exposed", "release", "total", "read"} == set(stats.phase_seconds)
    assert stats.live == prefill.channel.stats().live == 0


def test_the_events_of_decode_tell_what_became_of_a_request(engines):
    decode, prefill = engines("d"), engines("p")
    remote_request = accepted(decode, prefill)
    prefill.channel.submit(RefusePrefill(remote_request, "out of luck"))
    decode.wait_for_event()
    assert prefill.wait_for_event() == Closed("h", "cancelled")
    lines = [event.what.what for event in decode.noted]
    assert lines[0] == "h decode: accepted by p"
    assert "h decode: fails: refused out of luck" in lines
    assert "h decode: failed: refused; the KV of 0 tokens that were read is kept" in lines
    assert {event.request_id for event in decode.noted} == {"r"}


def test_a_cancelled_handoff_stops_its_reads_before_prefill_gives_up_its_blocks(engines):
    decode, prefill = engines("d", [FakeKVWorker(holding=True)]), engines("p")
    accepted(decode, prefill)
    prefill.channel.submit(ReportProgress("h", 8, [5, 6]))
    assert decode.workers[0].has_read.wait(WAIT_S)
    (info,) = decode.channel.snapshot()
    assert (info.handoff_id, info.request_id, info.peer, info.state) == ("h", "r", "p", "reading")
    decode.channel.submit(CancelHandoff("h", paid_ns=7))
    assert decode.wait_for_event() == Failed("h", "cancelled", 0, False)
    assert prefill.wait_for_event() == Closed("h", "cancelled", paid_ns=7)
    assert decode.workers[0].memory == {}


def test_a_failed_read_lets_the_pair_rest(engines):
    gone = FakeKVWorker()
    decode, prefill = engines("d"), engines("p", [gone])
    remote_request = remote_request_for(decode)
    del FakeKVWorker.everyone[gone.address.encode()]
    decode.channel.submit(OpenHandoff(remote_request, [20, 21, 22, 23]))
    prefill.channel.submit(AcceptPrefill(remote_request))
    prefill.channel.submit(ReportProgress("h", 8, [5, 6]))
    assert decode.wait_for_event() == Failed("h", "read", 0, True, "rank 0: connection lost")
    assert decode.channel.quarantined() == decode.channel.stats().quarantined == ["p"]
    FakeKVWorker.everyone[gone.address.encode()] = gone


def test_an_engine_whose_agent_does_not_stop_must_end(engines):
    impatient = HandoffConfig(role="decode", heartbeat_s=0.1, progress_s=0.5)
    decode, prefill = engines("d", [FakeKVWorker(holding=True, mute=True)], impatient), engines("p")
    accepted(decode, prefill)
    prefill.channel.submit(ReportProgress("h", 8, [5, 6]))
    assert decode.workers[0].has_read.wait(WAIT_S)
    decode.channel.submit(CancelHandoff("h"))
    assert decode.wait_until_broken() == "rank 0 does not stop reading for handoff h"


def test_a_decode_engine_that_is_gone_loses_its_lease(engines):
    decode, prefill = engines("d"), engines("p", config=HASTY)
    remote_request = remote_request_for(decode)
    decode.channel.close()
    prefill.channel.submit(AcceptPrefill(remote_request))
    assert prefill.wait_for_event() == Closed("h", "expired")
    assert prefill.channel.stats().lease_expiries == 1


def test_a_prefill_engine_that_ends_says_so(engines):
    decode, prefill = engines("d"), engines("p")
    accepted(decode, prefill)
    decode.wait_for_stats(lambda stats: "accept" in stats.phase_seconds)
    prefill.channel.close()
    assert decode.wait_for_event() == Failed("h", "refused", 0, True, "the engine ends")


def test_a_channel_closes_though_an_agent_does_not_answer(engines):
    decode, prefill = engines("d", [FakeKVWorker(holding=True, mute=True)]), engines("p")
    accepted(decode, prefill)
    prefill.channel.submit(ReportProgress("h", 8, [5, 6]))
    assert decode.workers[0].has_read.wait(WAIT_S)
    decode.channel.close()
    assert "handoff-channel d" not in [thread.name for thread in threading.enumerate()]


def test_nonsense_from_the_network_is_counted_and_harms_nobody(engines):
    decode, prefill, refused = engines("d"), engines("p"), Refused("handoffs", "malformed")
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(decode.channel.peer.address)
        stranger.send(b"nonsense")
        stranger.send(msgspec.msgpack.encode(Envelope(prefill.channel.peer, 1, Released("h", 1, True))))  # not for us
        decode.wait_for_stats(lambda stats: stats.stale_messages == 1)
        refused.wait_for(1)
    remote_request = remote_request_for(decode)
    decode.channel.submit(OpenHandoff(remote_request, [20, 21, 22, 23]))
    prefill.channel.submit(RefusePrefill(remote_request, "no room"))
    assert decode.wait_for_event() == Failed("h", "refused", 0, True, "no room")


def test_a_prefill_request_with_an_impossible_address_harms_nobody_else(engines):
    decode, prefill, refused = engines("d"), engines("p", config=HASTY), Refused("handoffs", "unexpected")
    prefill.channel.submit(AcceptPrefill(remote_request_for(decode, "bad", address="nowhere")))
    assert prefill.wait_for_event() == Closed("bad", "expired")
    assert refused.count >= 1
    remote_request = remote_request_for(decode)
    decode.channel.submit(OpenHandoff(remote_request, [20, 21, 22, 23]))
    prefill.channel.submit(RefusePrefill(remote_request, "no room"))
    assert decode.wait_for_event().reason == "refused"


def test_a_channel_whose_thread_has_died_ends_its_engine(engines):
    engine = engines("d")
    remote_request = remote_request_for(engine)
    engine.channel.submit(AcceptPrefill(remote_request))
    engine.channel.submit(AcceptPrefill(remote_request))  # forbidden
    assert "a prefill request is accepted only once" in engine.wait_until_broken()


@pytest.mark.parametrize(("decode_ranks", "prefill_ranks"), [(1, 1), (2, 1), (1, 2)])
def test_real_agents_bring_the_heads_of_every_rank(engines, decode_ranks, prefill_ranks):
    heads = 4
    whole = torch.arange(16 * 2 * 2 * heads * BLOCK * 8, dtype=torch.float32).reshape(16, 2, 2, heads, BLOCK, 8)

    def workers(cache, size):
        shards = [HeadShard(heads, rank, size) for rank in range(size)]
        caches = [cache[:, :, :, shard.start : shard.stop].clone() for shard in shards]
        made = [KVTransferWorker([c], shards=[s], transport="tcp") for c, s in zip(caches, shards, strict=True)]
        return made, caches

    local_workers, local = workers(torch.zeros_like(whole), decode_ranks)
    remote_workers, _ = workers(whole, prefill_ranks)
    decode, prefill = engines("d", local_workers), engines("p", remote_workers)
    remote_request = remote_request_for(decode)
    decode.channel.submit(OpenHandoff(remote_request, [3, 2, 1, 0]))
    prefill.channel.submit(AcceptPrefill(remote_request))
    prefill.channel.submit(ReportProgress("h", 8, [5, 9]))
    prefill.channel.submit(ReportProgress("h", 14, [5, 9, 12, 13]))
    prefill.channel.submit(FinishPrefill("h", first_of(remote_request)))
    assert isinstance(decode.wait_for_event(), Received)
    assert prefill.wait_for_event() == Closed("h", "released")
    received = torch.cat(local, dim=3)
    assert torch.equal(received[[3, 2, 1, 0]], whole[[5, 9, 12, 13]])
    assert decode.channel.stats().bytes_read == {"tcp": 4 * whole[0].numel() * 4}
