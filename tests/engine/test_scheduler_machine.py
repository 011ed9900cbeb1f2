"""Random arrivals, aborts and pool sizes; the books must balance after every step, and everyone must finish."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fake_runner import Harness

MAX_MODEL_LEN = 24
PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [10], []]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        spare_blocks=st.integers(0, 12),
        depth=st.integers(1, 2),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        block_size=st.sampled_from([1, 2, 4, 5]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, spare_blocks, depth, seqs, budget, block_size, caching, policy):
        self.h = Harness(
            num_blocks=-(-MAX_MODEL_LEN // block_size) + spare_blocks,
            max_model_len=MAX_MODEL_LEN,
            depth=depth,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            block_size=block_size,
            enable_prefix_caching=caching,
            scheduling_policy=policy,
        )
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(1, 49), min_size=1, max_size=15),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 3),
    )
    def add(self, prefix, rest, max_tokens, ignore_eos, priority, seed):
        self.count += 1
        self.h.add(
            f"r{self.count}",
            prefix + rest,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            priority=priority,
            seed=seed,
        )

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.h.step()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data):
        self.h.abort(f"r{data.draw(st.integers(1, self.count))}")

    def teardown(self):
        if hasattr(self, "h"):
            self.h.run(limit=self.count * MAX_MODEL_LEN * 4 + 10)
            assert set(self.h.finished) == set(self.h.prompts)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
