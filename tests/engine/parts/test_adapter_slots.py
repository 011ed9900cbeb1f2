"""Which adapter is in which slot, and who may start: the scheduler on a fake runner."""

from __future__ import annotations

from random import Random

import pytest

from engine.lora.errors import AdapterError
from engine.lora.messages import SequenceAdapter
from engine.parts.kept import adapter_of
from engine.parts.lora.adapter_slots import AdapterSlots
from engine.parts.lora.inputs import AdapterRead
from engine.wire.parts.adapter import ModelAdapter, digest_of
from tests.fake_runner import Harness


def adapter(name: str) -> ModelAdapter:
    return ModelAdapter(name, f"/adapters/{name}", f"digest of {name}")


class Adapted(Harness):
    """A device whose slots are filled some steps after they were asked for. Every step is checked to read the adapters
    of its requests, when it is planned and when it ends."""

    def __init__(self, max_loras: int, random: Random | None = None, failing: str = "", **options):
        self.slots, self.random, self.failing = AdapterSlots(max_loras), random or Random(0), failing
        super().__init__(**{"num_blocks": 40, "max_model_len": 60, **options}, adapters=self.slots)
        self.device: dict[int, str] = {}
        self.of_sequences: dict[int, tuple[int, str]] = {}  # slot of a sequence -> slot of its adapter, digest
        self.read: list[list[tuple[int, str]]] = []  # of each planned step
        self.loads: list = []
        self.started: list[str] = []

    def advance(self) -> bool:
        """Return whether anything happened."""
        plan = self.scheduler.schedule(now=0.0)
        self.check()
        self.loads += self.scheduler.take_messages("adapters")
        if plan is not None:
            running = {request.slot: request for request in self.scheduler.queue.running}
            for new in plan.added:
                request = running[new.slot]
                adapter = new.record(SequenceAdapter)
                self.of_sequences[new.slot] = (-1 if adapter is None else adapter.slot, digest_of(adapter_of(request)))
                self.started.append(request.request_id)
            self.read.append([self.of_sequences[slot] for slot in plan.slots])
            self.check_reads(self.read[-1])
            self.prepared.append(self.runner.prepare(plan))
        load = self.loads and self.random.random() < 0.5
        if load:
            self.finish_load()
        if self.prepared and (plan is None or len(self.prepared) > self.depth):
            self.check_reads(self.read.pop(0))
            self.commit()
        self.scheduler.check()
        return bool(plan or load or self.prepared or self.loads)

    def finish_load(self) -> None:
        load = self.loads.pop(0)
        failed = load.lora.name == self.failing
        if not failed:
            self.device[load.slot] = load.lora.digest
        self.scheduler.apply(AdapterRead(load.number, "cannot be loaded" if failed else None), 0.0)
        self.record()

    def check_reads(self, read: list[tuple[int, str]]) -> None:
        for slot, digest in read:
            assert (slot < 0) == (not digest)
            assert not digest or self.device.get(slot) == digest, "a step reads another adapter"

    def until_done(self) -> None:
        for _ in range(3000):
            self.advance()
            if not self.scheduler.has_work:
                return
        raise AssertionError("no end in sight")


@pytest.mark.parametrize("seed", range(25))
def test_steps_read_the_adapters_of_their_requests_and_everyone_ends(seed):
    random = Random(seed)
    depth, seqs = random.randint(0, 1), random.randint(2, 6)
    policy = random.choice(["fcfs", "priority"])
    h = Adapted(
        random.randint(1, 3),
        random,
        failing="a5",
        depth=depth,
        max_num_seqs=seqs,
        num_blocks=22,
        scheduling_policy=policy,
    )
    for i in range(30):
        name = random.choice([None, "a0", "a0", "a1", "a2", "a3", "a4", "a5"])
        prompt = [random.randrange(1, 40) for _ in range(random.randint(1, 20))]
        lora, priority = name and adapter(name), random.choice([0, 0, 1])
        h.add(str(i), prompt, lora=lora, priority=priority, max_tokens=random.randint(1, 9))
        if random.random() < 0.2:
            h.abort(str(random.randint(0, i))) if str(random.randint(0, i)) in h.scheduler.queue.live else None
        for _ in range(random.randint(0, 3)):
            h.advance()
    h.until_done()
    assert len(h.finished) == 30 and not h.slots.loading
    for name, event in h.finished.items():
        failed = event.delta.error is not None
        assert failed == (adapter_of(event.request) == adapter("a5")) or event.delta.finish_reason == "abort", name


def test_requests_with_other_adapters_do_not_wait_for_one_that_is_loaded():
    h = Adapted(2)
    h.add("slow", [1, 2], lora=adapter("a"))
    h.add("base", [1, 2])
    h.scheduler.schedule(now=0.0)
    assert [r.request_id for r in h.scheduler.queue.running] == ["base"] and h.slots.loading


def test_a_popular_adapter_does_not_keep_another_one_out():
    """With one slot: requests for b come in between those for a, which never end to come."""
    h = Adapted(1, max_num_seqs=2)
    for i in range(4):
        h.add(f"a{i}", [1, 2], lora=adapter("a"), max_tokens=4)
    h.add("b", [1, 2], lora=adapter("b"), max_tokens=4)
    for i in range(4, 60):
        h.add(f"a{i}", [1, 2], lora=adapter("a"), max_tokens=4)
        for _ in range(3):
            h.advance()
    assert "b" in h.finished and h.started.index("b") <= 5
    h.until_done()


def test_a_slot_that_was_filled_for_a_request_goes_to_a_more_urgent_one_that_comes_later():
    """As on day 53 of tests.days, where the earlier one had waited for its grammar: neither of the two ever started."""
    h = Adapted(1, scheduling_policy="priority")
    h.add("late", [1, 2], lora=adapter("a"), priority=1)
    assert h.scheduler.schedule(now=0.0) is None and h.slots.loading
    h.add("urgent", [1, 2], lora=adapter("b"), priority=0)
    h.until_done()
    assert h.started == ["urgent", "late"]


def test_a_slot_that_a_request_waits_for_goes_to_a_more_urgent_one_that_comes_later():
    """As on day 1148 of tests.days: the urgent one held all blocks, without which nobody who had the slot started."""
    h = Adapted(1, scheduling_policy="priority")
    h.add("first", [1, 2], lora=adapter("a"), priority=1, max_tokens=20)
    while "first" not in h.started:
        h.advance()
    h.add("late", [1, 2], lora=adapter("b"), priority=1)
    h.advance()
    h.add("urgent", [1, 2], lora=adapter("c"), priority=0)
    h.until_done()
    assert h.started == ["first", "urgent", "late"]
    assert h.slots.new_load(adapter("d")) == 4, "each adapter was loaded once"


def test_a_request_that_leaves_no_longer_keeps_others_from_the_slot_that_it_waited_for():
    """As on day 462 of tests.days: later requests with the slot's own adapter waited for ever."""
    h = Adapted(1, max_num_seqs=3)
    h.add("first", [1, 2], lora=adapter("a"), max_tokens=20)
    while "first" not in h.started:
        h.advance()
    h.add("other", [1, 2], lora=adapter("b"))
    h.advance()
    h.add("same", [3, 4], lora=adapter("a"))
    h.advance()
    assert "same" not in h.started
    h.abort("other")
    h.until_done()
    assert h.started == ["first", "same"]


def test_a_slot_that_was_filled_for_a_request_is_kept_from_later_ones():
    h = Adapted(1)
    h.add("first", [1, 2], lora=adapter("a"))
    assert h.scheduler.schedule(now=0.0) is None and h.slots.loading
    h.add("second", [1, 2], lora=adapter("b"))
    h.until_done()
    assert h.started == ["first", "second"]


def test_the_adapter_that_was_used_longest_ago_makes_room():
    h = Adapted(2)
    for name in ("a", "b", "a", "c"):
        h.add(f"{name} {len(h.prompts)}", [1, 2, 3], lora=adapter(name), max_tokens=2)
        h.until_done()
    assert sorted(h.slots.digests) == [adapter("a").digest, adapter("c").digest]


def test_an_adapter_without_a_digest_is_refused():
    with pytest.raises(AdapterError, match="digest"):
        Adapted(1).add("x", [1], lora=ModelAdapter("a", "/adapters/a"))
