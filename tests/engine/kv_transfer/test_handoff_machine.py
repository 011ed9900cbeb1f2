"""Both sides of the protocol, for prompts, requests that move and blocks that are fetched, under every fault at once:
messages lost, doubled, late, out of order; engines that die, start again, stand still, and have clocks that drift;
blocks that are lost before they are asked for; reads that are slow, fail, or go on after the source's blocks have been
reused. The world itself asserts that nothing wrong is counted as right, that nothing is written late, that every
handoff ends once, and that the books balance."""

import hypothesis.strategies as st
from hypothesis import event, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.wire.handoff import Failed
from tests.engine.kv_transfer.handoff_world import BLOCK, CONFIG, World
from tests.examples import examples

CLOCKS = st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, -1000.0, 1e6]))  # drift, offset


class HandoffMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 3),
        num_blocks=st.integers(8, 24),
        clocks=st.tuples(CLOCKS, CLOCKS, CLOCKS),
        mortal=st.booleans(),
    )
    def start(self, ranks, num_blocks, clocks, mortal):
        self.mortal = mortal  # an engine that dies takes much with it that would have come to light
        self.w = World(prefills=2, decode_ranks=ranks, num_blocks=num_blocks)
        for name, (drift, offset) in zip(("d", "p0", "p1"), clocks, strict=True):
            self.w.start(
                name, num_ranks=self.w.engines[name].num_ranks, num_blocks=num_blocks, drift=drift, offset=offset
            )
        self.remote_requests = []  # under way, as calls
        self.count = 0

    # -- what engines do -----------------------------------------------------------------------------------

    @rule(
        length=st.one_of(st.integers(8, 40), st.integers(1, 7)),
        skip=st.integers(0, 4),
        copies=st.integers(0, 2),
        prefill=st.sampled_from(["p0", "p1"]),
        num_tokens=st.sampled_from([12, 40, 7, 0]),
    )
    def open(self, length, skip, copies, prefill, num_tokens):
        """copies: of the prefill request that may arrive later, too."""
        decode = self.w.decode
        skip = min(skip, (length - 1) // BLOCK) * BLOCK
        if decode.paused or -(-(length - skip) // BLOCK) > len(decode.free):
            return
        self.count += 1
        remote_request = decode.open([1000 * self.count + i for i in range(length)], skip)
        self.remote_requests += [remote_request] * copies
        if copies < 2:
            self.arrive(remote_request, prefill)
            self.compute(0, num_tokens)

    @rule(
        length=st.integers(1, 40),
        skip=st.integers(0, 4),
        holder=st.sampled_from(["p0", "p1"]),
        late=st.sampled_from([0.0, 0.0, 3.0, 12.0]),
        claimed=st.booleans(),
    )
    def a_request_moves(self, length, skip, holder, late, claimed):
        """late: seconds until an engine goes on with it. claimed: whether any does."""
        source, decode = self.w.engines[holder], self.w.decode
        self.count += 1
        if source.paused or (held := source.hold([1000 * self.count + i for i in range(length)])) is None:
            return
        self.w.advance(late)
        skip = min(skip, (length - 1) // BLOCK) * BLOCK
        if claimed and not decode.paused and -(-(length - skip) // BLOCK) <= len(decode.free):
            decode.open(held.token_ids, skip, source.peer, handoff_id=held.handoff_id)

    @rule(
        blocks=st.integers(1, 10),
        skip=st.integers(0, 4),
        cached=st.integers(0, 10),
        holder=st.sampled_from(["p0", "p1"]),
        lost=st.sampled_from([0, 0, 1, 10]),
    )
    def blocks_are_fetched(self, blocks, skip, cached, holder, lost):
        """cached: blocks that the holder has had, of which it loses some before it is asked."""
        source, decode = self.w.engines[holder], self.w.decode
        self.count += 1
        tokens, skip = [1000 * self.count + i for i in range(blocks * BLOCK)], min(skip, blocks - 1) * BLOCK
        source.cache(tokens[: cached * BLOCK])
        source.lose(lost)
        if not decode.paused and blocks - skip // BLOCK <= len(decode.free):
            decode.fetch(tokens, skip, source.peer)

    @rule(holder=st.sampled_from(["p0", "p1"]), count=st.integers(1, 10))
    def cached_blocks_are_lost(self, holder, count):
        self.w.engines[holder].lose(count)

    @precondition(lambda self: self.remote_requests)
    @rule(choice=st.integers(0, 9), prefill=st.sampled_from(["p0", "p1", None]))
    def prefill_request_arrives_or_fails(self, choice, prefill):
        remote_request = self.remote_requests.pop(choice % len(self.remote_requests))
        if prefill is not None:
            self.arrive(remote_request, prefill)
        elif not self.w.decode.paused:
            self.w.decode.remote_prefill_failed(remote_request.handoff_id)

    @rule(choice=st.integers(0, 9), num_tokens=st.integers(1, 40))
    def compute(self, choice, num_tokens):
        jobs = self.jobs()
        if jobs and num_tokens:
            engine, handoff_id = jobs[choice % len(jobs)]
            engine.compute(handoff_id, num_tokens)

    # -- messages and reads, in any order ------------------------------------------------------------------

    @rule(choices=st.lists(st.integers(0, 5), min_size=1, max_size=30))
    def things_happen(self, choices):
        for choice in choices:
            self.one_thing_happens(choice)

    @rule()
    def all_is_well_for_a_moment(self):
        self.w.settle()

    @rule(seconds=st.sampled_from([0.25, 1.0, 1.0, 3.0, 12.0]), settle=st.booleans(), reads=st.booleans())
    def time_passes(self, seconds, settle, reads):
        self.w.advance(seconds, settle, reads)

    # -- faults --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.w.network)
    @rule(choice=st.integers(0, 9), doubled=st.booleans())
    def message_is_lost_or_doubled(self, choice, doubled):
        flight = self.w.network[choice % len(self.w.network)]
        if doubled:
            self.w.network.append(flight)
        else:
            self.w.network.remove(flight)

    @precondition(lambda self: self.w.decode.reads)
    @rule(choice=st.integers(0, 9))
    def read_fails(self, choice):
        reads = self.w.decode.reads
        self.w.decode.read_step(reads[choice % len(reads)], error="no progress")

    @rule(choice=st.integers(0, 9), here=st.booleans())
    def one_side_gives_up(self, choice, here):
        if here and self.w.decode.opened and not self.w.decode.paused:
            opened = sorted(self.w.decode.opened)
            self.w.decode.cancel(opened[choice % len(opened)])
        elif jobs := self.jobs():
            engine, handoff_id = jobs[choice % len(jobs)]
            engine.refuse(handoff_id)

    @precondition(lambda self: self.mortal)
    @rule(name=st.sampled_from(["d", "p0", "p1"]), pause=st.booleans())
    def an_engine_dies_or_stands_still(self, name, pause):
        if pause:
            self.w.engines[name].paused = True
        else:
            self.w.crash(name)

    @precondition(lambda self: self.w.decode.reads)
    @rule(settle=st.booleans(), reads=st.booleans(), hear=st.booleans())
    def decode_sleeps_past_the_lease(self, settle, reads, hear):
        """What its ranks read meanwhile, or after it, is of others. hear: of the reads before the end of the lease."""
        decode = self.w.decode
        decode.paused = True
        self.w.advance(2.5 * CONFIG.lease_s, settle, reads)
        decode.paused = False
        while decode.reads:
            decode.read_step(decode.reads[0])
        while hear and decode.answers:
            decode.hear_worker()

    @precondition(lambda self: any(engine.paused for engine in self.w.engines.values()))
    @rule()
    def engines_go_on(self):
        for engine in self.w.engines.values():
            engine.paused = False

    # -- what must hold --------------------------------------------------------------------------------------

    @invariant()
    def a_broken_engine_ends(self):
        if hasattr(self, "w") and self.w.decode.protocol.broken:
            assert self.w.decode.reads or self.w.decode.answers  # a rank had not stopped, or not been heard
            self.w.crash("d")

    @invariant()
    def only_those_handoffs_fail_for_good_that_should(self):
        if hasattr(self, "w"):
            for result in self.w.decode.results.values():
                if isinstance(result, Failed):
                    assert result.reason not in ("prompt_hash", "protocol"), result  # nobody lies in this world

    def arrive(self, remote_request, name):
        engine = self.w.engines[name]
        if not engine.paused and remote_request.handoff_id not in engine.jobs:
            engine.accept(remote_request)

    def one_thing_happens(self, choice):
        w, decode = self.w, self.w.decode
        things = [(w.deliver_now, flight) for flight in w.network if not w.waiting_for_grammar(flight)]
        things += [(decode.read_step, read) for read in decode.reads]
        things += [(lambda engine: engine.answer(), engine) for engine in w.running() if engine.asked]
        things += [(lambda _: decode.hear_worker(), None)] * bool(decode.answers and not decode.paused)
        if things:
            do, what = things[choice % len(things)]
            do(what)

    def jobs(self):
        return [(engine, h) for engine in self.w.running() for h in engine.jobs]

    def teardown(self):
        if not hasattr(self, "w"):
            return
        for engine in self.w.engines.values():
            engine.paused = False
        slowest = min(engine.drift for engine in self.w.engines.values())
        if self.count % 2:  # nothing arrives any more: every handoff ends by the clocks of its two sides
            self.w.lossy = True
            self.w.advance((CONFIG.lease_s + 1.0) / slowest)
        else:  # all works again
            for engine, handoff_id in self.jobs():
                engine.compute(handoff_id, 40)
            self.w.advance((CONFIG.lease_s + CONFIG.accept_s + 2.0) / slowest)
        for engine in self.w.engines.values():
            engine.lose(engine.num_blocks)
            assert not engine.protocol.broken
            assert not engine.protocol.decode_handoffs
            assert not engine.protocol.prefill_handoffs
            assert len(engine.free) == engine.num_blocks
        for outcome in self.w.outcomes:
            event(outcome)  # shown by --hypothesis-show-statistics


TestHandoffs = HandoffMachine.TestCase
TestHandoffs.settings = settings(max_examples=examples(200), stateful_step_count=60)
