"""Both sides of the protocol under every fault at once: messages lost, doubled, late, out of order; engines that die,
start again, stand still, and have clocks that drift; reads that are slow, fail, or go on after the source's blocks have
been reused. The world itself asserts that nothing wrong is counted as right, that nothing is written late, that every
handoff ends once, and that the books balance."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_transfer.events import Failed
from tests.engine.kv_transfer.handoff_world import BLOCK, CONFIG, World

CLOCKS = st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, -1000.0, 1e6]))  # drift, offset


class HandoffMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 3),
        num_blocks=st.integers(8, 24),
        clocks=st.tuples(CLOCKS, CLOCKS, CLOCKS),
    )
    def start(self, ranks, num_blocks, clocks):
        self.w = World(prefills=2, decode_ranks=ranks, num_blocks=num_blocks)
        for name, (drift, offset) in zip(("d", "p0", "p1"), clocks, strict=True):
            self.w.start(
                name, num_ranks=self.w.engines[name].num_ranks, num_blocks=num_blocks, drift=drift, offset=offset
            )
        self.tickets = []  # under way, as calls
        self.count = 0

    # -- what engines do -----------------------------------------------------------------------------------

    @rule(length=st.integers(1, 40), skip=st.integers(0, 4), copies=st.integers(1, 3))
    def open(self, length, skip, copies):
        decode = self.w.decode
        skip = min(skip, (length - 1) // BLOCK) * BLOCK
        if decode.paused or -(-(length - skip) // BLOCK) > len(decode.free):
            return
        self.count += 1
        ticket = decode.open([1000 * self.count + i for i in range(length)], skip)
        self.tickets += [ticket] * copies

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), prefill=st.sampled_from(["p0", "p0", "p1"]))
    def ticket_arrives(self, data, prefill):
        engine = self.w.engines[prefill]
        ticket = data.draw(st.sampled_from(self.tickets))
        if not engine.paused:
            self.tickets.remove(ticket)
            if ticket.handoff_id not in engine.jobs:
                engine.accept(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def ticket_fails(self, data):
        ticket = data.draw(st.sampled_from(self.tickets))
        if not self.w.decode.paused:
            self.tickets.remove(ticket)
            self.w.decode.ticket_failed(ticket.handoff_id)

    @precondition(lambda self: self.jobs())
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def compute(self, data, num_tokens):
        engine, handoff_id = data.draw(st.sampled_from(self.jobs()))
        engine.compute(handoff_id, num_tokens)

    @precondition(lambda self: self.jobs())
    @rule(data=st.data())
    def prefill_gives_up(self, data):
        engine, handoff_id = data.draw(st.sampled_from(self.jobs()))
        engine.refuse(handoff_id)

    @precondition(lambda self: self.w.decode.opened and not self.w.decode.paused)
    @rule(data=st.data())
    def cancel(self, data):
        self.w.decode.cancel(data.draw(st.sampled_from(sorted(self.w.decode.opened))))

    # -- reads ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.w.decode.reads)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def read(self, data, steps):
        read = data.draw(st.sampled_from(self.w.decode.reads))
        for _ in range(steps):
            if read in self.w.decode.reads:
                self.w.decode.read_step(read)

    @precondition(lambda self: self.w.decode.reads)
    @rule(data=st.data())
    def read_fails(self, data):
        self.w.decode.read_step(data.draw(st.sampled_from(self.w.decode.reads)), error="no progress")

    @precondition(lambda self: self.w.decode.answers and not self.w.decode.paused)
    @rule()
    def agent_is_heard(self):
        self.w.decode.hear_agent()

    # -- the network -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.w.network)
    @rule(data=st.data(), again=st.booleans())
    def message_arrives(self, data, again):
        flight = data.draw(st.sampled_from(self.w.network))
        engine = self.w.by_address(flight.address)
        if engine is not None and engine.paused:
            return
        if not again:
            self.w.network.remove(flight)
        self.w.deliver(flight)

    @precondition(lambda self: self.w.network)
    @rule(data=st.data())
    def message_is_lost(self, data):
        self.w.network.remove(data.draw(st.sampled_from(self.w.network)))

    @rule()
    def all_is_well_for_a_moment(self):
        self.w.settle()

    # -- time and faults -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0, 12.0]), settle=st.booleans(), reads=st.booleans())
    def time_passes(self, seconds, settle, reads):
        self.w.advance(seconds, settle, reads)

    @rule(name=st.sampled_from(["d", "p0", "p1"]))
    def crash(self, name):
        self.w.crash(name)

    @rule(name=st.sampled_from(["d", "p0", "p1"]))
    def pause_or_resume(self, name):
        self.w.engines[name].paused ^= True

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
                    assert result.reason not in ("chain", "protocol"), result  # nobody lies in this world

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
            assert not engine.protocol.broken
            assert not engine.protocol.inbound
            assert not engine.protocol.outbound
            assert len(engine.free) == engine.num_blocks


TestHandoffs = HandoffMachine.TestCase
TestHandoffs.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
