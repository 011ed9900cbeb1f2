from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from engine.assembly.build import build_engine
from engine.clock import Clock
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.output import Event
from engine.engine_options import BLOCK_SIZES
from engine.errors import EngineUnavailable, InvalidParameter, Overloaded, PromptTooLong
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.handoffs.handoffs import Handoffs
from engine.wire.generate_request import GenerateRequest
from engine.wire.handoff import OpenHandoff
from engine.wire.messages import CancelDispatch, DispatchRemote, RemoteRequestFailed
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenDelta
from tests.models import make_model


class FakeClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Engine:
    """A core, the deltas that came out of it, and a clock of its own."""

    def __init__(self, core: EngineCore, clock: FakeClock):
        self.core, self.clock = core, clock
        self.deltas: dict[str, list[TokenDelta]] = {}

    def add(self, name: str, prompt: list[int] | None = None, *, timeout_s: float | None = None, **params) -> None:
        settings = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **params}
        message = GenerateRequest(
            request_id=name,
            prompt=prompt or [5, 6, 7, 8, 9],
            params=SamplingParams(**settings),
            timeout_s=timeout_s,
        )
        self.core.add(message)
        self.deltas[name] = []

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, events: list[Event]) -> None:
        self.core.scheduler.check()
        for event in events:
            deltas = self.deltas[event.delta.request_id]
            assert not any(delta.finish_reason for delta in deltas), "a delta after the last one"
            deltas.append(event.delta)

    def abort(self, name: str) -> None:
        self.record(self.core.abort(name))

    def go(self) -> None:
        while self.core.has_work:
            self.step()
        assert all(deltas[-1].finish_reason for deltas in self.deltas.values())
        assert self.core.stats().blocks_used == 0

    def answer(self, name: str, *args, **params) -> list[int]:
        """Compute a request, and all others, and return its tokens."""
        self.add(name, *args, **params)
        self.go()
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def last(self, name: str) -> TokenDelta:
        return self.deltas[name][-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request) -> bool:
    return request.param


@pytest.fixture
def make_engine(folder, overlap):
    cores = []

    def make(wake=lambda: None, **options) -> Engine:
        defaults = {
            "block_size": 4,
            "num_gpu_blocks_override": 64,
            "max_num_seqs": 4,
            "num_threads": 1,
            "async_scheduling": overlap,
        }
        clock = FakeClock()
        config = EngineConfig(**{"model": str(folder), **defaults, **options})
        cores.append(build_engine(config, wake=wake, clock=Clock(clock.monotonic)))
        return Engine(cores[-1], clock)

    yield make
    for core in cores:
        core.close()


@pytest.fixture
def engine(make_engine) -> Iterator[Engine]:
    return make_engine()


def test_blocks_have_the_default_size_of_the_device_where_nobody_says(make_engine, monkeypatch):
    assert make_engine(block_size=None).core.stats().block_size == 16
    monkeypatch.setitem(BLOCK_SIZES, "cpu", 64)
    engine = make_engine(block_size=None)
    prompt = list(range(3, 90)) * 2
    engine.add("first", prompt)
    engine.go()
    engine.add("second", prompt)
    engine.go()
    assert engine.core.ranks.runner.kv_caches[0].shape[4] == engine.core.stats().block_size == 64
    assert engine.tokens("first") == engine.tokens("second")
    assert engine.core.scheduler.totals.prefix_hit_tokens == 2 * 64


def test_a_deadline_ends_its_own_request_and_no_other(engine):
    expected = engine.answer("patient")
    engine.add("late", timeout_s=2.0)
    engine.add("generous", timeout_s=1000.0)
    engine.add("without")
    for _ in range(4):
        engine.step()
    assert engine.tokens("late"), "it was computing"
    engine.clock.now += 1.999
    engine.step()
    assert engine.last("late").finish_reason is None
    engine.clock.now += 0.001
    engine.step()
    last = engine.last("late")
    assert last.finish_reason == "error"
    assert last.error.code == "request_timeout"
    assert (last.error.status, last.error.retryable) == (408, False)
    assert "request late was not finished within its deadline of 2.0 s" in last.error.message
    engine.go()
    assert engine.tokens("generous") == engine.tokens("without") == expected
    assert engine.tokens("late") == expected[: len(engine.tokens("late"))]


def test_a_deadline_also_ends_a_request_that_still_waits(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("running")
    engine.step()
    engine.add("waiting", timeout_s=1.0)
    engine.step()
    engine.clock.now += 1.0
    engine.step()
    assert engine.last("waiting").error.code == "request_timeout"
    assert engine.last("waiting").times is None, "it never ran"
    engine.go()
    assert engine.last("running").finish_reason == "length"


def test_deadlines_pass_in_their_own_order(engine):
    for name, seconds in [("third", 3.0), ("first", 1.0), ("second", 2.0), ("also second", 2.0)]:
        engine.add(name, timeout_s=seconds)
    ended = []
    for _ in range(4):
        engine.step()
        ended.append([name for name, deltas in engine.deltas.items() if deltas and deltas[-1].finish_reason])
        engine.clock.now += 1.0
    assert ended == [
        [],
        ["first"],
        ["first", "second", "also second"],
        ["third", "first", "second", "also second"],
    ]
    engine.go()


def test_a_deadline_that_passes_after_the_end_changes_nothing(engine):
    engine.add("a", timeout_s=5.0)
    engine.go()
    engine.clock.now += 10.0
    assert engine.core.step() == []
    assert engine.last("a").finish_reason == "length"
    engine.add("a", timeout_s=5.0)  # the same id again, with a deadline of its own
    engine.step()
    engine.go()
    assert engine.last("a").finish_reason == "length"


def test_an_abort_while_a_step_is_in_flight_leaves_the_others_as_they_were(engine):
    prompts = {name: [10 * i + j for j in range(9)] for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.go()
    expected = {name: engine.tokens(name) for name in prompts}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    while not engine.tokens("b"):
        engine.step()
    engine.abort("b")
    assert engine.last("b").finish_reason == "abort"
    engine.abort("b")  # it is gone: nothing happens
    engine.abort("nobody")
    engine.add("d", prompts["b"])  # may get the slot and blocks that the step in flight still writes to
    engine.go()
    assert engine.tokens("a") == expected["a"]
    assert engine.tokens("c") == expected["c"]
    assert engine.tokens("d") == expected["b"]


def test_an_abort_of_everything_leaves_no_work_and_an_engine_that_still_works(engine):
    expected = engine.answer("a")
    engine.add("b")
    engine.step()
    engine.step()
    engine.abort("b")
    assert engine.answer("c") == expected


def test_a_request_whose_tokens_are_all_banned_fails_alone_and_the_engine_lives_on(engine):
    expected = engine.answer("good")
    engine.add("hopeless", allowed_token_ids=[2], min_tokens=3)
    engine.add("good too")
    engine.go()
    assert engine.last("hopeless").finish_reason == "error"
    assert engine.last("hopeless").error.code == "request_error"
    assert engine.last("hopeless").error.status == 400
    assert engine.tokens("hopeless") == []
    assert engine.tokens("good too") == expected


def test_a_model_that_computes_nan_fails_its_requests_and_the_engine_lives_on(engine):
    engine.add("good")
    engine.go()
    weight = engine.core.ranks.runner.model.norm.weight
    before = weight.clone()
    weight.fill_(float("nan"))
    engine.add("one", [30, 31, 32], logprobs=1, temperature=1.0)
    engine.add("two", [40, 41, 42], prompt_logprobs=1)
    engine.go()
    assert engine.last("one").error.status == engine.last("two").error.status == 500
    weight.copy_(before)
    assert engine.answer("good again") == engine.tokens("good")


@pytest.mark.parametrize("overlap", [True, False])
def test_blocks_of_a_request_whose_logits_are_not_finite_reach_others_without_what_it_left_there(overlap, tmp_path):
    """FlashAttention 3 multiplies V beyond the end of a sequence by 0, which leaves a NaN what it is (Dao-AILab #2374);
    and a cached prefix must not spread it."""
    folder = make_model(tmp_path, "llama")
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        num_gpu_blocks_override=6,
        max_num_seqs=2,
        block_size=4,
        num_threads=1,
        async_scheduling=overlap,
    )
    engine = Engine(build_engine(config), FakeClock())
    cache = engine.core.ranks.runner.kv_caches[0]
    engine.core.ranks.runner.model.embed_tokens.weight[96] = float("nan")
    engine.add("bad", [5, 6, 7, 96, 9, 10, 11, 12, 13])
    engine.go()
    assert engine.last("bad").error.status == 500 and cache.isnan().any()
    engine.add("good", [5, 6])
    while not engine.tokens("good"):
        engine.step()
    (request,) = engine.core.scheduler.queue.running
    assert engine.core.scheduler.kv_cache.pool.num_cached == 0
    assert not cache[request.tables[0].blocks].isnan().any()
    engine.core.close()


def test_after_a_step_that_raised_the_engine_says_so_and_computes_no_more(engine, monkeypatch):
    def launch(inputs):
        raise ValueError("out of order")

    monkeypatch.setattr(engine.core.ranks.runner, "launch", launch)
    engine.add("one")
    with pytest.raises(ValueError, match="out of order"):
        engine.go()
    with pytest.raises(EngineUnavailable, match="an earlier step failed: ValueError: out of order"):
        engine.step()


def test_a_refused_request_raises_and_leaves_nothing(make_engine):
    engine = make_engine(max_model_len=32, max_waiting=1)
    with pytest.raises(PromptTooLong, match="32 tokens > 31"):
        engine.add("long", [1] * 32, timeout_s=1.0)
    with pytest.raises(InvalidParameter, match="prompt must be token ids from 0 to 96"):
        engine.add("unknown token", [1, 97])
    assert not engine.core.has_work
    engine.add("a")
    with pytest.raises(Overloaded):
        engine.add("b", timeout_s=1.0)
    engine.clock.now += 5.0
    engine.go()
    assert list(engine.deltas) == ["a"]


def test_stats_add_up_on_the_way_and_return_to_zero(make_engine):
    engine = make_engine(num_gpu_blocks_override=20, max_num_seqs=3)
    lengths = {"a": 20, "b": 9, "c": 30, "d": 1, "e": 13}
    for i, (name, length) in enumerate(lengths.items()):
        engine.add(name, [(7 * i + j) % 97 for j in range(length)], max_tokens=20)
    while engine.core.has_work:
        engine.step()
        stats = engine.core.stats()
        assert stats.blocks_total == 20 == stats.blocks_free + stats.blocks_cached + stats.blocks_used
        ended = sum(stats.finished.values())
        assert stats.running + stats.waiting + ended == 5
        assert stats.running <= 3
        assert stats.generation_tokens == sum(len(engine.tokens(name)) for name in lengths)
        if "d" in engine.deltas and len(engine.tokens("a")) == 5:
            engine.abort("d")
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.finished == {"length": 4, "abort": 1}
    assert stats.generation_tokens == 4 * 20 + len(engine.tokens("d"))
    assert stats.preemptions == sum(deltas[-1].num_preemptions for deltas in engine.deltas.values()) > 0
    assert stats.blocks_cached > 0 and stats.block_size == 4
    ran = [name for name in lengths if engine.last(name).times is not None]
    assert stats.prompt_tokens == stats.prefix_queried_tokens == sum(lengths[name] for name in ran)


def test_times_are_seconds_since_arrival(engine):
    engine.add("a", max_tokens=2)
    engine.clock.now += 3.0
    while engine.core.has_work:
        engine.step()
        engine.clock.now += 1.0
    times = engine.last("a").times
    assert times.scheduled_s == 3.0
    assert 3.0 <= times.first_token_s < times.finished_s


def test_the_age_of_the_last_step_counts_only_while_there_is_work(engine):
    engine.clock.now += 100.0
    assert engine.core.last_step_age_s == 0.0
    engine.add("a")
    assert engine.core.last_step_age_s == 0.0, "waiting for its first step since now, not since the start"
    engine.clock.now += 2.0
    assert engine.core.last_step_age_s == 2.0
    engine.go()
    engine.clock.now += 100.0
    assert engine.core.last_step_age_s == 0.0


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
    spent = engine.core.stats().cost_s
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


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pause_without_a_lost_engine_is_neither_a_steps_time_nor_a_requests_cost(make_engine, monkeypatch, overlap):
    engine = make_engine(async_scheduling=overlap)
    launcher, launch = engine.core.ranks.launcher, engine.core.ranks.launcher.launch

    def paused_once(inputs):
        launched = launch(inputs)
        if isinstance(launched, Future):  # while it computes, the fake clock stands still
            launched.result()
        if inputs.plan.step == 8:
            engine.clock.now += 7.0
            launcher.went_on_at = engine.clock.now
        engine.clock.now += 0.5
        return launched

    monkeypatch.setattr(launcher, "launch", paused_once)
    engine.add("one", max_tokens=12)
    engine.go()
    stats, cost = engine.core.stats(), engine.last("one").cost
    assert stats.cost_s["recovery"] == pytest.approx(7.0)
    assert stats.cost_s["requests"] == cost.compute_s == pytest.approx(0.5 * stats.steps)
    assert 0.4 < stats.decode_seconds_per_step + stats.decode_seconds_per_sequence < 0.6
    assert cost.kv_gib_s == pytest.approx(stats.kv_gib_s)
    blocks = 5 * engine.core.ledger.block_bytes[0] / 2**30
    assert cost.kv_gib_s < blocks * 0.5 * stats.steps, "nobody pays for KV meanwhile"
