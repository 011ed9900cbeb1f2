from __future__ import annotations

import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.engine_options import BLOCK_SIZES
from engine.errors import EngineUnavailable, InvalidParameter, Overloaded, PromptTooLong
from tests.engine.core.real_engine import Engine, FakeClock
from tests.models import make_model


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
