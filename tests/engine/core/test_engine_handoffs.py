"""The step loop of engines that hand KV over."""

from __future__ import annotations

import threading

import pytest

from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs
from engine.wire.handoff import OpenHandoff
from engine.wire.parts.costs import CostStats
from engine.wire.parts.handoffs import CancelDispatch, DispatchRemote, RemoteRequestFailed
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.engine.core.real_engine import Engine


def decode_engine(make_engine, **options) -> tuple[Engine, threading.Event]:
    """Has all of its prompts computed by others, of which there are none; the event is set when it is woken."""
    woken = threading.Event()
    handoff = HandoffConfig(role="decode", policy="always", transport="tcp", max_attempts=1)
    return make_engine(handoff=handoff, wake=woken.set, **options), woken


def remote_request_of(engine: Engine) -> RemoteRequest:
    (notice,) = engine.core.mail.take_notices()
    assert isinstance(notice, DispatchRemote)
    return notice.request


def fail(engine: Engine, woken: threading.Event, handoff_id: str) -> None:
    engine.core.mail[HandoffCourier].channel.submit(RemoteRequestFailed(handoff_id, "nobody there", False))
    assert woken.wait(60)
    woken.clear()


def test_while_all_kv_is_on_its_way_the_engine_is_idle_and_no_step_is_late(make_engine):
    engine, woken = decode_engine(make_engine)
    assert engine.core.idle
    engine.add("a")
    assert not engine.core.idle
    engine.step()
    engine.step()
    assert engine.core.idle and engine.core.has_work
    engine.clock.now += 100.0
    assert engine.core.last_step_age_s == 0.0
    stats = engine.core.stats()
    assert (stats.receiving, stats.blocks_reserved, stats.running, stats.waiting) == (1, 2, 0, 0)
    fail(engine, woken, remote_request_of(engine).handoff_id)
    engine.step()
    assert not engine.core.idle and engine.core.stats().receiving == 0
    engine.go()


def test_time_in_which_requests_wait_for_kv_is_not_idle_although_another_request_arrives(make_engine):
    engine, _ = decode_engine(make_engine)
    engine.clock.now += 10.0
    engine.add("a")
    engine.step()
    engine.step()
    assert engine.core.idle and engine.core.has_work
    engine.clock.now += 100.0
    engine.add("b")
    spent = engine.core.stats().record(CostStats).seconds
    assert (spent["idle"], spent["stalled"]) == (10.0, 100.0)


def test_a_deadline_ends_a_request_whose_kv_is_on_its_way(make_engine):
    engine, woken = decode_engine(make_engine)
    engine.add("a", timeout_s=2.0)
    engine.step()
    remote_request = remote_request_of(engine)
    assert remote_request.timeout_s == 2.0
    engine.clock.now += 2.0
    engine.step()
    assert engine.last("a").error.code == "request_timeout"
    assert engine.core.has_work and engine.core.stats().blocks_reserved == 2, "somebody may still write there"
    assert woken.wait(60)
    while engine.core.has_work:
        engine.step()
    assert engine.core.stats().blocks_used == 0
    assert engine.core.mail.take_notices()[0] == CancelDispatch(remote_request.handoff_id)


def test_an_abort_of_a_request_whose_kv_is_on_its_way_leaves_the_others_as_they_were(make_engine):
    engine, woken = decode_engine(make_engine)
    engine.add("a")
    engine.step()
    first = remote_request_of(engine).handoff_id
    engine.add("b")
    engine.step()
    engine.abort("a")
    assert engine.last("a").finish_reason == "abort"
    engine.step()
    remote_requests = [n.request.handoff_id for n in engine.core.mail.take_notices() if isinstance(n, DispatchRemote)]
    assert first not in remote_requests
    fail(engine, woken, remote_requests[0])
    engine.go()
    assert len(engine.tokens("b")) == 10 and not engine.tokens("a")


def make_remote_request(engine: Engine, **change) -> RemoteRequest:
    """Return a request of a decode engine that is not there."""
    fields = {
        "handoff_id": "h",
        "request_id": "r",
        "attempt": 1,
        "token_ids": [5, 6, 7, 8, 9],
        "num_prompt": 5,
        "params": SamplingParams(temperature=0.0),
        "seed": 1,
        "cache_salt": "",
        "skip": 0,
        "fingerprint": engine.core.scheduler.parts[Handoffs].requests.fingerprint,
        "decode": Peer("decode", "tcp://127.0.0.1:9", 1),
    }
    return RemoteRequest(**{**fields, **change})


def test_a_prefill_engine_computes_a_prefill_request_and_holds_its_blocks(make_engine):
    woken = threading.Event()
    handoff = HandoffConfig(role="prefill", transport="tcp", lease_s=2.0, heartbeat_s=0.5)
    engine = make_engine(handoff=handoff, wake=woken.set)
    remote_request = make_remote_request(engine)
    engine.deltas["h"] = []
    assert engine.core.mail[HandoffCourier].prefill(engine.core, remote_request)
    assert engine.core.mail[HandoffCourier].prefill(engine.core, remote_request), (
        "a prefill request that comes twice is one"
    )
    while not engine.core.idle:
        engine.step()
    stats = engine.core.stats()
    assert (stats.leased, stats.blocks_leased, stats.running) == (1, 2, 0)
    assert woken.wait(60)  # nobody gives a sign of life, so the lease ends
    engine.go()
    assert engine.last("h").finish_reason == "abort"
    assert engine.core.mail[HandoffCourier].channel.stats().lease_expiries == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "another model"}, "fingerprint must be that of this engine"),
        ({"token_ids": [1] * 300, "num_prompt": 300}, "prompt is too long: 300 tokens"),
        ({"token_ids": [], "num_prompt": 0}, "prompt must be at least one token"),
    ],
)
def test_a_prefill_request_that_cannot_be_served_is_refused(make_engine, caplog, change, reason):
    engine = make_engine(handoff=HandoffConfig(role="prefill", transport="tcp"))
    assert not engine.core.mail[HandoffCourier].prefill(engine.core, make_remote_request(engine, **change))
    assert reason in caplog.text
    assert not engine.core.has_work


@pytest.mark.parametrize("handoffs", [False, True])
def test_closing_twice_is_fine_also_with_handoffs_under_way(make_engine, handoffs):
    engine = decode_engine(make_engine)[0] if handoffs else make_engine()
    engine.add("a")
    engine.step()
    engine.core.close()
    engine.core.close()


def test_an_engine_learns_what_its_steps_cost(make_engine):
    # in turn: with overlap the fake clock would move in one thread while another reads it
    engine = make_engine(handoff=HandoffConfig(role="prefill", transport="tcp"), async_scheduling=False)
    engine.add("first", max_tokens=4)
    engine.go()
    assert engine.core.stats().seconds_per_step == 0.0, "the first steps count for nothing"
    launch = engine.core.ranks.runner.launch

    def slow(inputs):
        engine.clock.now += 0.5 + 0.25 * inputs.plan.num_tokens
        return launch(inputs)

    engine.core.ranks.runner.launch = slow
    for i in range(3):
        engine.add(f"long {i}", [(7 * i + j) % 97 for j in range(20 + i)], max_tokens=3)
        engine.go()
    stats = engine.core.stats()
    assert (stats.seconds_per_step, stats.seconds_per_token) == pytest.approx((0.5, 0.25), rel=0.01)


@pytest.mark.parametrize("overlap", [True, False])
def test_nobody_hears_of_blocks_that_a_step_under_way_may_still_write_into(make_engine, monkeypatch, overlap):
    """That step may compute one token too many for a sequence that has just ended and given its blocks back; if they
    are to receive KV from elsewhere, the other engine is asked only once the step has ended."""
    engine = make_engine(handoff=HandoffConfig(role="prefill", transport="tcp"), async_scheduling=overlap)
    core, runner = engine.core, engine.core.ranks.runner
    launched: list[int] = []
    planned_during: list[int] = []  # steps that had not ended when the newest plan was made
    schedule, launch, collect, submit = (
        core.scheduler.schedule,
        runner.launch,
        runner.collect,
        core.mail[HandoffCourier].channel.submit,
    )

    def note_schedule(now):
        planned_during[:] = launched
        return schedule(now)

    def note_launch(inputs):
        launched.append(inputs.plan.step)
        return launch(inputs)

    def note_collect(step):
        launched.remove(step.inputs.plan.step)
        return collect(step)

    def note_submit(*actions):
        asks = any(isinstance(action, OpenHandoff) for action in actions)
        assert not (asks and set(planned_during) & set(launched))
        submit(*actions)

    monkeypatch.setattr(core.scheduler, "schedule", note_schedule)
    monkeypatch.setattr(runner, "launch", note_launch)
    monkeypatch.setattr(runner, "collect", note_collect)
    monkeypatch.setattr(core.mail[HandoffCourier].channel, "submit", note_submit)
    for i in range(3):
        engine.add(f"request {i}", max_tokens=3 + i)
    engine.go()
    assert not launched
