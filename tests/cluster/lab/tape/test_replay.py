"""The tape of a real engine: every plan is made again, whatever else is found out, and nothing is said of any text."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cluster.lab.tape import replay as replay_module
from cluster.lab.tape.replay import Diverged, Failed, Replay
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.door.inputs import PartInput
from engine.core.door.journal import NOBODY_LISTENS
from engine.core.engine import EngineCore
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.options.speculation import SpeculativeConfig
from engine.parts.kv_fetching.kv_fetching import split_names
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.parts.tape.engine_tape import EngineTape, tape_with_key
from engine.parts.tape.recorder import SETTLED
from engine.parts.tape.ring import Ring
from engine.spec_decode.ngram import NgramDrafter
from engine.wire.block_hash import block_hashes
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.engine.parts.tape.taped import KEY, TapedHarness, replay, tape_of
from tests.models import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def make_core(folder):
    cores = []

    def make(**options) -> EngineCore:
        defaults = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "num_threads": 1, "tape_mib": 16}
        cores.append(build_engine(EngineConfig(**{"model": str(folder), **defaults, **options})))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def add(core: EngineCore, name: str, prompt: list[int], **params) -> None:
    settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    core.add(GenerateRequest(request_id=name, prompt=prompt, params=SamplingParams(**settings)))


def go(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def replayed(core: EngineCore) -> Replay:
    replay = Replay(tape_of(core.journal))
    for _ in replay.run():
        replay.scheduler.check()
    assert replay.scheduler.totals == core.scheduler.totals
    return replay


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_hits_preemptions_and_aborts_are_decided_again(make_core, overlap):
    core = make_core(async_scheduling=overlap, num_gpu_blocks_override=14, max_num_seqs=3)
    first = list(range(5, 25))
    add(core, "first", first)
    go(core)
    add(core, "again", [*first, 30, 31])
    for i in range(3):
        add(core, f"long{i}", [40 + i] * 9, max_tokens=20)
    for _ in range(8):
        core.step()
    core.abort("long1")
    go(core)
    totals = core.scheduler.totals
    assert totals.preemptions and totals.prefix_hit_tokens
    found = replayed(core)
    assert found.scheduler.totals.steps == totals.steps


def test_a_turn_that_repeats_the_answer_hits_the_blocks_of_the_answer_again(make_core):
    core = make_core()
    prompt, answer = list(range(5, 14)), []
    add(core, "turn", prompt)
    while core.has_work:
        for event in core.step():
            answer += event.delta.token_ids
    add(core, "next", prompt + answer + [7])
    go(core)
    assert core.scheduler.totals.prefix_hit_tokens == (len(prompt) + len(answer) - 1) // 4 * 4
    replayed(core)


@pytest.mark.parametrize("name", ["size", "disk_size"])
def test_blocks_go_down_to_a_tier_and_come_up_again(make_core, name, tmp_path):
    core = make_core(**{f"kv_offloading_{name}": 0.05, "kv_offloading_dir": str(tmp_path)}, enable_prefix_caching=True)
    first = [5 + i % 80 for i in range(80)]
    add(core, "first", first)
    go(core)
    while not core.scheduler.parts[KVOffloading].flushed():
        core.step()
    for i in range(3):
        add(core, f"evicts{i}", [10 + i] * 150)
        go(core)
    add(core, "again", first)
    go(core)
    assert core.scheduler.parts[KVOffloading].report().hit_tokens >= 64
    taken = core.journal.take()
    for block_hash in split_names(block_hashes(first, 4)[: 16 * 8]):
        assert core.scheduler.parts[KVOffloading].name_of(0, block_hash) in taken
        assert core.scheduler.parts[KVOffloading].name_of(0, block_hash) not in tape_with_key(taken, KEY)
    found = replayed(core)
    again, before = (each.scheduler.parts[KVOffloading].report() for each in (found, core))
    assert again.hit_tokens == before.hit_tokens


def test_a_scheduler_whose_state_is_larger_than_the_tape_has_none(caplog, monkeypatch):
    monkeypatch.setattr("engine.parts.tape.recorder.dump", lambda scheduler, times: bytes(2**20 + 1))
    small = TapedHarness(num_blocks=64, max_model_len=64)
    small.add("a", [1, 2, 3])
    small.run()
    assert "more than engine.tape_mib" in caplog.text
    assert small.tape.take() == b"" and small.scheduler.journal is NOBODY_LISTENS


def test_a_tape_that_ends_later_is_dropped_and_nothing_is_recorded_any_more(monkeypatch):
    harness = TapedHarness(num_blocks=64, max_model_len=64, drafter=NgramDrafter(1, 3))
    harness.add("a", [1, 2, 3, 1, 2, 3])
    harness.run()
    ring = harness.tape._ring
    assert harness.tape.take() and ring.answers
    monkeypatch.setattr("engine.parts.tape.recorder.dump", lambda scheduler, times: bytes(2**20 + 1))
    harness.tape._begin()
    assert harness.tape.take() == b""
    harness.add("b", [1, 2, 3, 1, 2, 3])
    harness.run()
    assert not ring.answers and not ring.entries


class BudgetSet(PartInput, frozen=True):
    """An input that no part has yet."""

    tokens: int

    def apply(self, scheduler: Scheduler, now: float) -> None:
        scheduler.config = replace(scheduler.config, max_num_batched_tokens=self.tokens)


def test_whatever_enters_a_scheduler_is_on_the_tape_and_enters_it_again():
    """There is no other way in, so the input of a new part cannot be forgotten."""
    harness = TapedHarness(num_blocks=64, max_model_len=64, max_num_batched_tokens=16)
    harness.add("a", [*range(1, 40)])
    harness.step()
    harness.scheduler.apply(BudgetSet(8), harness.now)
    harness.run()
    found = replay(harness.tape)
    assert [plan.num_tokens for plan in harness.plans][:4] == [16, 8, 8, 7]
    assert found.scheduler.config.max_num_batched_tokens == 8
    assert found.scheduler.totals == harness.scheduler.totals


def test_answers_count_for_the_length_of_a_segment():
    ring = Ring(8000)
    ring.begin(b"", 0.0)
    ring.answers += bytes(600)
    assert not ring.is_due
    ring.entries += bytes(600)
    assert ring.is_due


def test_a_replay_keeps_few_states_if_they_are_large(monkeypatch):
    harness = TapedHarness(num_blocks=64, max_model_len=64)
    for i in range(30):
        harness.add(f"r{i}", [1, 2, 3, i], max_tokens=8)
    harness.run()
    tape, kept = tape_of(harness.tape), []
    monkeypatch.setattr(replay_module, "KEYFRAME", 2)
    for most in (2**30, 10 * len(tape.segments[0].state)):
        monkeypatch.setattr(replay_module, "KEPT_BYTES", most)
        found = Replay(tape)
        found.go_to(len(found.moments))
        kept.append(len(found._keyframes))
        found.go_to(7)
        assert found.position == 7
    assert kept[0] > 40 and kept[1] <= 12


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_verified_again(make_core, method, monkeypatch):
    from tests.fake_drafter import draft_always

    draft_always(monkeypatch)
    core = make_core(speculative_config=SpeculativeConfig(method=method))
    for i in range(4):
        add(core, str(i), [5, 6, 7, 8] * 4 + [i + 20], max_tokens=30)
        core.step()
    go(core)
    assert core.stats().record(SpecDecodeStats).num_accepted_tokens
    replayed(core)


def test_grammars_and_stop_tokens_end_requests_again(make_core):
    core = make_core()
    form = StructuredOutputsParams(regex="[a-c]{1,6}")
    add(core, "form", [5, 6, 7], structured_outputs=form, ignore_eos=False, max_tokens=20)
    add(core, "alone", [9, 10, 11], max_tokens=10)
    tokens = []
    while core.has_work:
        tokens += [
            token for event in core.step() for token in event.delta.token_ids if event.request.request_id == "alone"
        ]
    add(core, "stops", [9, 10, 11], max_tokens=10, stop_token_ids=[tokens[3]])
    go(core)
    found = replayed(core)
    assert found.scheduler.totals.finished["stop"] >= 1


def test_steps_are_encoded_some_at_a_time_and_an_idle_engine_has_none_left(make_core):
    core = make_core()
    add(core, "a", [5, 6, 7, 8, 9], max_tokens=60)
    pending, most = core.journal._ring.pending, 0
    while core.has_work:
        core.step()
        most = max(most, len(pending))
    assert 4 < most < 2 * SETTLED
    core.step()
    assert not pending
    replayed(core)


def test_a_tape_taken_while_requests_run_replays_up_to_there(make_core):
    core = make_core()
    for i in range(3):
        add(core, str(i), [5, 6, 7, 8, 9 + i], max_tokens=20)
    for _ in range(7):
        core.step()
    found = replayed(core)
    assert [request.request_id for request in found.scheduler.queue.running] == ["0", "1", "2"]


def test_one_can_go_back_and_forth(make_core):
    core = make_core()
    add(core, "a", [5, 6, 7, 8, 9], max_tokens=30)
    go(core)
    found = replayed(core)
    end = found.position
    lengths = {}
    for position in (end // 2, 3, end, 7, 0, end // 2):
        found.go_to(position)
        live = [len(request.tokens) for request in found.scheduler.queue.live.values()]
        assert lengths.setdefault(position, live) == live
    assert lengths[0] == lengths[end] == [] and lengths[7]


def test_another_scheduler_is_found_at_its_first_other_plan(make_core, monkeypatch):
    core = make_core()
    for i in range(4):
        add(core, str(i), [5, 6, 7, 8, 9 + i], max_tokens=9)
    go(core)
    tape = tape_of(core.journal)
    plain = Scheduler._plan_decodes

    def leaves_out_one(scheduler: Scheduler) -> tuple[int, list[Request]]:
        if scheduler.totals.steps == 5:
            running = scheduler.queue.running
            scheduler.queue.running = running[:-1]
            try:
                return plain(scheduler)
            finally:
                scheduler.queue.running = running
        return plain(scheduler)

    monkeypatch.setattr(Scheduler, "_plan_decodes", leaves_out_one)
    found = Replay(tape)
    with pytest.raises(Diverged, match="another one") as caught:
        for _ in found.run():
            pass
    assert sum(m.digest not in (None, 0) for m in found.moments[: caught.value.index]) == 5


def test_nothing_on_a_tape_tells_a_token_and_nobody_can_confirm_a_prompt(make_core):
    core = make_core()
    prompt = [77, 78, 79, 80, 81, 82, 83, 84, 85]
    core.add(GenerateRequest(request_id="secret", prompt=prompt, cache_salt="the salt", params=SamplingParams(
        max_tokens=5, stop=["the stop"], logit_bias={77: 1.0}, bad_words=["the word"]
    )))  # fmt: skip
    core.step()
    core.step()
    taken = core.journal.take()
    hashes = block_hashes(prompt, 4, "the salt")
    assert hashes[:16] in taken, "in the engine's own memory"
    tape = tape_with_key(taken, KEY)
    assert hashes[:16] not in tape and b"the " not in tape and b"secret" in tape
    assert tape_with_key(taken, b"another key.....") != tape
    for request in Replay(msgspec.msgpack.decode(tape, type=EngineTape)).scheduler.queue.live.values():
        assert set(request.tokens) == {0}


def test_a_failed_step_keeps_the_tape_and_fails_again_in_the_replay(make_core, monkeypatch, tmp_path):
    core = make_core(tape_dir=str(tmp_path))
    add(core, "a", [5, 6, 7, 8, 9])
    for _ in range(3):
        core.step()

    def fails(scheduler, sequences):
        if scheduler.totals.steps == 3:
            raise KeyError("a bug")

    monkeypatch.setattr(Scheduler, "_start_step", fails)
    with pytest.raises(KeyError):
        core.step()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    from engine.parts.tape.file import read_tapes

    (tape,) = read_tapes(file)
    assert tape.reason == "KeyError: 'a bug'"
    found = Replay(tape)
    with pytest.raises(Failed, match="a bug"):
        for _ in found.run():
            pass
    late = Replay(msgspec.structs.replace(tape, cause="late"))
    with pytest.raises(Diverged) as caught:
        for _ in late.run():
            pass
    assert not isinstance(caught.value, Failed), "the engine went on when this tape was kept"
    monkeypatch.undo()
    found.go_to(0)
    with pytest.raises(Diverged, match="did not return"):
        for _ in found.run():
            pass


@pytest.mark.slow
def test_the_ring_is_bounded_and_its_oldest_part_is_lost_first():
    small = type("Small", (TapedHarness,), {"max_bytes": 100_000})(num_blocks=64, max_model_len=64)
    for i in range(150):
        small.add(f"r{i}", [1, 2, 3, 4, 5, i % 40], max_tokens=20)
        small.run()
        if i % 10 == 0:
            assert len(small.tape.take()) < 105_000
    assert len(tape_of(small.tape).segments) > 1
    found = replay(small.tape)
    assert 30 < sum(len(moment.ended) for moment in found.moments) < 150
    assert found.scheduler.totals == small.scheduler.totals


def test_an_engine_can_do_without(make_core):
    core = make_core(tape_mib=0)
    assert core.journal is NOBODY_LISTENS and core.journal.take() == b""
    assert "schedule" not in vars(core.scheduler)
