"""EngineServer over real sockets. Every wait is for a message; the limits only bound a failure."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from engine.config import EngineConfig
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.distributed.tp_group import TPGroup
from engine.options.handoff import HandoffConfig
from engine.serving.server import EngineServer
from engine.wire.block_hash import block_hashes
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import (
    Abort,
    Add,
    Drain,
    EngineStatus,
    EngineUpdate,
    Notice,
    ResetPrefixCache,
    Subscribe,
    kinds_of,
)
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.handoffs import CancelPrefill, DispatchRemote, Prefill, PrefillReplicas, RemoteRequestFailed
from engine.wire.parts.holds import HoldMark, HoldStats, PromptHold
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineLoad
from engine.wire.token_delta import TokenBatch
from tests.engine_sockets import Inbox, Ingress, ServerThread
from tests.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def control(context) -> Inbox:
    return Inbox(context, EngineStatus)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def thread(request, folder, control):
    config = EngineConfig(
        model=str(folder),
        block_size=4,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        num_threads=1,
        async_scheduling=request.param,
    )
    thread = ServerThread(EngineServer(config, engine_id="engine-7", status_to=control.address))
    yield thread
    thread.stop()
    if thread.error is not None:
        raise thread.error


@pytest.fixture
def server(thread) -> EngineServer:
    return thread.server


@pytest.fixture
def ingress(context, server) -> Ingress:
    return Ingress(context, server)


def test_a_request_comes_back_as_batches_of_deltas_with_exactly_one_last(ingress):
    ingress.add("a")
    assert len(ingress.tokens("a")) == 8
    assert [len(delta.token_ids) for delta in ingress.deltas["a"]] == [1] * 8
    assert [delta.finish_reason for delta in ingress.deltas["a"]] == [None] * 7 + ["length"]
    assert ingress.last("a").times is not None
    assert {batch.engine_id for batch in ingress.batches} == {"engine-7"}
    steps = [batch.step for batch in ingress.batches]
    assert steps == sorted(steps)
    ingress.add("b")
    assert ingress.tokens("b") == ingress.tokens("a")  # `gather` would have met anything more for "a"


def test_a_request_without_a_token_tells_what_happens_to_it_before_it_has_one(ingress, monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.TIMELINE_PERIOD_S", 0.0)
    for name in "abcde":  # one more than can run at once
        ingress.add(name, max_tokens=30)
    ingress.last("e")
    first, *_ = deltas = ingress.deltas["e"]
    assert (first.token_ids, first.finish_reason) == ([], None)
    told = [event.what for delta in deltas for event in delta.timeline]
    assert told[0] == first.timeline[0].what
    assert told[0].startswith("queued behind ")
    assert told[1].startswith("to be computed here; ")
    assert told[2:] == ["first token", "ended: length, 30 output tokens"]


def test_after_a_reset_of_the_prefix_cache_a_prompt_is_computed_again_with_the_same_tokens(ingress, server):
    for name in "abc":
        if name == "c":
            ingress.send(ResetPrefixCache())
        ingress.add(name, prompt=list(range(10, 30)))
        ingress.last(name)
    cached = [max(delta.num_cached_tokens for delta in ingress.deltas[name]) for name in "abc"]
    assert cached == [0, 16, 0]
    assert ingress.tokens("c") == ingress.tokens("b") == ingress.tokens("a")
    server._core.scheduler.kv_cache.pool.check()


def test_requests_that_run_together_share_one_batch_per_step(ingress):
    for name in "abc":
        ingress.add(name, max_tokens=20)
    for name in "abc":
        ingress.last(name)
    assert any(len(batch.deltas) == 3 for batch in ingress.batches)
    for batch in ingress.batches:
        names = [delta.request_id for delta in batch.deltas]
        assert len(names) == len(set(names))


def test_each_ingress_hears_of_its_own_requests_only(context, server):
    one, two = Ingress(context, server), Ingress(context, server)
    one.add("one", [1, 2, 3], max_tokens=20)
    two.add("two", [4, 5, 6], max_tokens=20)
    one.last("one")
    two.last("two")
    assert (set(one.deltas), set(two.deltas)) == ({"one"}, {"two"})
    assert one.is_empty() and two.is_empty()


def test_a_refused_request_gets_one_delta_with_the_error(ingress):
    ingress.add("too long", [1] * 300)
    ingress.add("unknown token", [1, 500])
    ingress.add("good")
    last = ingress.last("too long")
    assert last.finish_reason == "error"
    assert (last.error.code, last.error.status, last.error.retryable) == ("context_length_exceeded", 400, False)
    assert "> 255" in last.error.message
    assert ingress.last("unknown token").error.code == "invalid_parameter"
    assert ingress.last("good").finish_reason == "length"
    assert [len(ingress.deltas[name]) for name in ("too long", "unknown token")] == [1, 1]


def test_an_abort_ends_a_request_with_one_delta_and_the_others_go_on(ingress):
    ingress.add("other")
    expected = ingress.tokens("other")
    ingress.add("long", max_tokens=250)
    while not ingress.deltas["long"]:
        ingress.gather()
    ingress.send(Abort("long"))
    ingress.send(Abort("long"))
    ingress.send(Abort("never heard of"))
    ingress.add("next")
    assert ingress.last("long").finish_reason == "abort"
    assert ingress.tokens("next") == expected
    assert 0 < len(ingress.tokens("long")) < 250


def test_an_abort_right_behind_its_request_ends_it(ingress):
    ingress.add("a", max_tokens=250)
    ingress.send(Abort("a"))
    assert ingress.last("a").finish_reason == "abort"


def test_a_deadline_ends_a_request_with_a_timeout(ingress):
    ingress.add("late", max_tokens=250, timeout_s=0.0)
    last = ingress.last("late")
    assert (last.finish_reason, last.error.code, last.error.status) == ("error", "request_timeout", 408)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1 is no msgpack",
        b"not a command",
        msgspec.msgpack.encode({"type": "Add"}),
        msgspec.msgpack.encode({"type": "Add", "request": {"request_id": "a", "prompt": "text", "params": {}}}),
        msgspec.msgpack.encode({"type": "Explode"}),
    ],
)
def test_a_malformed_command_is_dropped_and_the_server_lives_on(ingress, message):
    ingress.send(message)
    ingress.add("a")
    assert len(ingress.tokens("a")) == 8


def test_a_stranger_gets_no_tokens_and_is_counted_in_the_status(folder, context, control):
    key = ClusterKey.generate()
    config = EngineConfig(model=str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=4, num_threads=1)
    notices = PullSocket(context, "127.0.0.1", EngineStatus, name="test", key=key)
    server = EngineServer(config, engine_id="e", status_to=notices.address, group=TPGroup.single(key))
    thread = ServerThread(server)
    try:
        stranger = Ingress(context, server)
        stranger.add("forged")
        member, tokens = PushSockets(context, key=key), Inbox(context, TokenBatch)
        params = SamplingParams(max_tokens=3)
        request = GenerateRequest(request_id="true", prompt=[5], params=params, reply_to=tokens.address)
        member.send(server.address, msgspec.msgpack.encode(Add(request)))  # whose tokens go to one without the key
        refused, ended = 0, []
        while not refused or "true" not in ended:
            assert notices.socket.poll(60_000)
            for status in notices.messages():
                ended += status.ended
                refused = status.refused.get("commands", {}).get("unauthenticated", 0)
        assert ended == ["true"]
        assert stranger.is_empty()
        assert tokens.is_empty()
    finally:
        thread.stop()
    assert thread.error is None


def raw_request(address: str, **params) -> dict:
    request = {"request_id": "a", "prompt": [1], "params": params, "reply_to": address}
    return {"type": "Add", "request": request}


@pytest.mark.parametrize(
    ("reply_to", "params"),
    [
        (None, {"temperature": -9.0}),
        ("", {}),
        ("nonsense", {}),
    ],
)
def test_a_request_that_no_ingress_of_ours_would_send_is_dropped_and_the_server_lives_on(
    folder, context, control, reply_to, params
):
    config = EngineConfig(model=str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=4, num_threads=1)
    thread = ServerThread(EngineServer(config, engine_id="e", status_to=control.address))
    ingress = Ingress(context, thread.server)
    address = ingress.address if reply_to is None else reply_to
    request = {"request_id": "odd", "prompt": [1], "params": params, "reply_to": address}
    ingress.send({"type": "Add", "request": request})
    ingress.add("good", max_tokens=100)
    ingress.wait_for_message_or_end_of(thread)
    thread.stop()
    assert thread.error is None


def test_status_messages_report_what_ended_and_the_state_of_the_engine(ingress, control):
    first = control.receive()
    assert (first.engine_id, first.ended, first.stats.steps) == ("engine-7", [], 0)
    ingress.add("a")
    ingress.add("refused", [1] * 300)
    ingress.add("aborted", max_tokens=250)
    ingress.send(Abort("aborted"))
    ended: list[str] = []
    while len(ended) < 3:
        status = control.receive()
        ended += status.ended
    assert sorted(ended) == ["a", "aborted", "refused"]
    assert status.stats.finished == {"length": 1, "abort": 1}
    assert status.stats.generation_tokens >= 8
    assert status.stats.blocks_total == 64
    assert (status.stats.running, status.stats.waiting, status.stats.blocks_used) == (0, 0, 0)
    assert status.last_step_age_s == 0.0


def test_a_router_that_follows_hears_of_load_and_blocks(context, server, ingress):
    router = Inbox(context, EngineUpdate)
    ingress.send(Subscribe(router.address))
    first = router.receive()
    assert first.snapshot and first.engine_id == "engine-7"
    assert first.load == EngineLoad(slots=4, blocks_total=64)
    ingress.add("a", list(range(1, 11)))
    ingress.tokens("a")
    heard = [router.receive()]
    while heard[-1].load.sequences or not any(update.prefilled for update in heard):
        heard.append(router.receive())
    assert [update.number for update in heard] == [first.number + 1 + i for i in range(len(heard))]
    assert [request_id for update in heard for request_id in update.admitted] == ["a"]
    assert [prefilled for update in heard for prefilled in update.prefilled] == [("a", 0)]
    names = b"".join(update.stored for update in heard)
    assert names.startswith(block_hashes(list(range(1, 11)), 4))


def test_a_router_hears_that_an_engine_is_about_to_stop(context, server, ingress):
    router = Inbox(context, EngineUpdate)
    ingress.send(Subscribe(router.address))
    assert not router.receive().draining
    ingress.send(Drain())
    while not router.receive().draining:
        pass
    ingress.add("a")
    assert len(ingress.tokens("a")) == 8, "it still takes what comes"


def test_an_address_that_is_none_cannot_be_followed_and_harms_nobody(ingress):
    ingress.send(Subscribe("nowhere"))
    ingress.add("a")
    assert len(ingress.tokens("a")) == 8


def test_an_idle_engine_ends_a_hold_when_its_time_is_over(folder, context, control, monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.05)
    config = EngineConfig(model=str(folder), block_size=4, num_gpu_blocks_override=64, max_model_len=64, num_threads=1)
    thread = ServerThread(EngineServer(config, engine_id="e", status_to=control.address))
    ingress = Ingress(context, thread.server)
    asked = GenerateRequest(
        request_id="a",
        prompt=list(range(3, 23)),
        params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        reply_to=ingress.address,
    ).asking(PromptHold(marks=[HoldMark(16, 0.3)]))
    ingress.send(Add(asked))
    ingress.last("a")
    assert [outcome.refusal for delta in ingress.deltas["a"] for outcome in delta.records(HoldOutcome)] == [None]
    while not (holds := control.receive().stats.record(HoldStats)).ended:
        pass
    thread.stop()
    assert (holds.granted, holds.holds, holds.device_blocks, holds.ended) == (1, 0, 0, {"expired": 1})


def test_status_messages_come_although_nothing_ends(control, server, monkeypatch):
    monkeypatch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.0)
    assert [control.receive().ended for _ in range(4)] == [[]] * 4


def test_a_vanished_ingress_does_not_stop_the_others(context, server):
    gone, there = Ingress(context, server), Ingress(context, server)
    gone.add("gone", max_tokens=100)
    gone.gather()
    gone._socket.close(linger=0)
    there.add("there", max_tokens=100)
    assert len(there.tokens("there")) == 100


def test_an_engine_that_waits_for_kv_sleeps_until_its_handoffs_wake_it(folder, context, monkeypatch):
    monkeypatch.setattr("engine.serving.server.POLL_MS", 3_600_000)  # nothing else will wake it
    control = Inbox(context, kinds_of(Notice))
    handoff = HandoffConfig(role="decode", policy="always", transport="tcp", max_attempts=2)
    config = EngineConfig(
        model=str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=4, num_threads=1, handoff=handoff
    )
    server = EngineServer(config, engine_id="e", status_to=control.address)
    ingress = Ingress(context, server)
    thread = ServerThread(server)
    ingress.add("a")
    attempts = []
    while len(attempts) < 2:
        notice = control.receive()
        if isinstance(notice, DispatchRemote):
            attempts.append(notice.request.attempt)
            ingress.send(RemoteRequestFailed(notice.request.handoff_id, "nobody there", True))
    assert attempts == [1, 2]
    assert len(ingress.tokens("a")) == 8
    server.stop()
    thread.stop()
    assert thread.error is None


def test_a_prefill_engine_names_handoffs_among_what_has_ended(folder, context):
    control = Inbox(context, kinds_of(Notice))
    handoff = HandoffConfig(role="prefill", transport="tcp", lease_s=0.4, heartbeat_s=0.1)
    config = EngineConfig(
        model=str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=4, num_threads=1, handoff=handoff
    )
    thread = ServerThread(EngineServer(config, engine_id="e", status_to=control.address))
    ingress = Ingress(context, thread.server)
    fingerprint = control.receive().fingerprint
    for name, tokens in [("taken", [5, 6, 7]), ("cancelled", [5, 6, 7]), ("too long", [5] * 300)]:
        remote_request = RemoteRequest(
            handoff_id=name,
            request_id=name,
            attempt=1,
            token_ids=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(),
            seed=1,
            cache_salt="",
            skip=0,
            fingerprint=fingerprint,
            decode=Peer("decode", "tcp://127.0.0.1:9", 1),
        )
        ingress.send(Prefill(remote_request))
    ingress.send(CancelPrefill("cancelled"))
    ended: list[str] = []
    while len(ended) < 3:
        status = control.receive()
        ended += status.ended
    assert ended[0] == "too long" and sorted(ended[1:]) == ["cancelled", "taken"]
    assert status.stats.finished == {"abort": 2}, "nobody has come for them"
    assert (status.stats.leased, status.stats.blocks_used) == (0, 0)
    assert ingress.is_empty()
    thread.stop()
    assert thread.error is None


@pytest.mark.parametrize("command", [CancelPrefill("h"), RemoteRequestFailed("h", "why", True), PrefillReplicas([])])
def test_an_engine_without_handoffs_drops_commands_for_them(ingress, command):
    ingress.send(command)
    ingress.add("a")
    assert len(ingress.tokens("a")) == 8


def test_stop_ends_run_and_closes_the_sockets_while_requests_are_running(folder, context, control):
    config = EngineConfig(model=str(folder), block_size=4, num_gpu_blocks_override=128, num_threads=1, max_num_seqs=4)
    server = EngineServer(config, engine_id="e", status_to=control.address)
    ingress = Ingress(context, server)
    thread = ServerThread(server)
    ingress.add("endless", max_tokens=None)
    ingress.gather()
    thread.stop()
    assert thread.error is None
    with context.socket(zmq.PULL) as again:
        again.bind(server.address)  # the port is free once more


def test_a_request_for_idle_times_is_refused_beside_others_and_aborted_when_one_comes(ingress, server):
    ingress.add("long", max_tokens=30)
    ingress.add("refused", when_idle=True)
    assert ingress.last("refused").error.code == "overloaded"
    assert len(ingress.tokens("long")) == 30
    ingress.add("checked", max_tokens=60, when_idle=True)
    ingress.gather()
    ingress.add("other")
    assert ingress.last("checked").finish_reason == "abort"
    assert len(ingress.tokens("other")) == 8
    ingress.add("again", when_idle=True)
    assert len(ingress.tokens("again")) == 8
