"""Random arrivals, aborts, handoffs and pool sizes: the books balance after every step, and everyone finishes."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.options.speculation import SpeculativeConfig
from engine.spec_decode.ngram import NgramDrafter
from engine.spec_decode.suffix import SuffixDrafter
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.examples import examples
from tests.fake_drafter import WildDrafter
from tests.fake_handoffs import DecodeHarness, PrefillHarness
from tests.fake_runner import VOCAB, Harness, Windows, expected_output

MAX_MODEL_LEN = 24
PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [10], []]
GROUPS: Sequence[Windows] = (
    (None,),
    (None,),
    (1,),
    (5,),
    (None, 3),
    (None, 8),
    (2, 7),
    (None, 1, 6),
    (None, 4, 23),
)  # windows of KV cache groups; fmt: skip
SUFFIX = SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=3.0, suffix_decoding_max_cached_requests=3)

prefixes = st.sampled_from(PREFIXES)
drafters = st.one_of(
    st.none(),
    st.builds(WildDrafter, st.integers(0, 100)),
    st.builds(NgramDrafter, st.just(1), st.integers(1, 3)),
    st.builds(SuffixDrafter, st.just(SUFFIX), st.integers(1, 2)),
)
proposals = st.one_of(st.none(), st.builds(WildDrafter, st.integers(0, 100)))  # of drafters with weights
forms = st.sampled_from([None, StructuredOutputsParams(regex="what the fake grammar says")])
rests = st.lists(st.integers(1, 49), min_size=1, max_size=15)


class SchedulerMachine(RuleBasedStateMachine):
    harness: type[Harness] = Harness
    groups: Sequence[Windows] = GROUPS
    hands_over = False

    @initialize(
        spare_blocks=st.integers(0, 12),
        depth=st.integers(1, 2),
        stages=st.integers(1, 3),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        block_size=st.sampled_from([1, 2, 4, 5]),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        drafter=drafters,
        weights=proposals,
        on_device=st.booleans(),
        token_cost=st.sampled_from([0.001, 0.1, 0.5]),
        draft_cost=st.sampled_from([0.0, 0.1, 0.9]),
        step_tokens=st.integers(1, 20),
        chunk=st.sampled_from([0, 0, 2, 4, 6]),
        num_snapshots=st.integers(1, 8),
        snapshot_interval=st.integers(0, 3),
        step_s=st.sampled_from([0.0, 0.01, 0.1]),
        partial=st.sampled_from([(0, None, None), (0, 1, None), (3, None, 1), (2, 2, 1)]),
        data=st.data(),
    )
    def start(
        self, spare_blocks, depth, stages, seqs, budget, block_size, caching, policy, drafter, weights, on_device,
        token_cost, draft_cost, step_tokens, chunk, num_snapshots, snapshot_interval, step_s, partial, data,
    ):  # fmt: skip
        """chunk: tokens from border to border of recurrent states; 0 for none. step_s: that a token takes. partial:
        limits of prompts that are computed in part."""
        windows = data.draw(st.sampled_from(self.groups))
        more = {"enable_prefix_caching": caching} | self.more_options(data)
        if chunk and self.hands_over:
            windows = (None,)  # states and windows are not handed over together
        if self.hands_over:
            num_snapshots = max(num_snapshots, 2)  # StateCacheManager.least; no engine has fewer (kv_groups/rank/)
        blocks = -(-MAX_MODEL_LEN // block_size)
        least = [  # for one sequence: its window, which may begin inside a block, and what a step computes
            blocks if window is None else min(blocks, -(-(window + step_tokens) // block_size) + 1)
            for window in windows
        ]
        self.h = self.harness(
            num_blocks=blocks,
            windows=windows,
            blocks=[count + data.draw(st.integers(0, spare_blocks)) for count in least],
            step_tokens=step_tokens,
            max_model_len=MAX_MODEL_LEN,
            depth=depth + stages - 1,
            stages=stages,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            block_size=block_size,
            scheduling_policy=policy,
            drafter=drafter,
            propose=weights.propose if weights and not drafter else None,
            on_device=on_device,
            step_cost=(1.0, token_cost),
            draft_cost=draft_cost,
            chunk=chunk,
            num_snapshots=num_snapshots,
            snapshot_interval=snapshot_interval,
            long_prefill_token_threshold=partial[0],
            max_num_partial_prefills=partial[1],
            max_long_partial_prefills=partial[2],
            **more,
        )
        self.h.seconds = lambda plan: step_s * plan.num_tokens
        if isinstance(drafter, WildDrafter):
            drafter.know(self.h)
        self.count = 0

    def more_options(self, data):
        return {}

    @rule(
        prefix=prefixes,
        rest=rests,
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 3),
        form=forms,
        stops=st.lists(st.integers(1, 49), max_size=8),
        prediction=st.one_of(st.just([]), st.lists(st.integers(0, 12), max_size=3)),
        client=st.sampled_from(["", "a", "b"]),
        ttft_slo_s=st.sampled_from([None, None, 0.3, 60.0]),
    )
    def add(self, prefix, rest, max_tokens, ignore_eos, priority, seed, form, stops, prediction, client, ttft_slo_s):
        """prediction: the answer itself, with something else at these places; none if empty."""
        self.count += 1
        self.h.add(
            f"r{self.count}",
            prefix + rest,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            priority=priority,
            seed=seed,
            structured_outputs=form,
            stop_token_ids=stops,
            client=client,
            ttft_slo_s=ttft_slo_s,
            prediction=self.predict(prefix + rest, prediction, seed, form) if prediction else None,
        )

    def predict(self, prompt, changed, seed, form):
        params = SamplingParams(seed=seed, ignore_eos=True, structured_outputs=form)
        output = expected_output(prompt, params, MAX_MODEL_LEN)
        return [VOCAB - 1 if i in changed else token for i, token in enumerate(output)]

    @rule(prefix=prefixes, rest=rests, priority=st.integers(-1, 1))
    def add_pooling(self, prefix, rest, priority):
        self.count += 1
        self.h.add(f"r{self.count}", prefix + rest, priority=priority, pooling=PoolingParams())

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


class DecodeMachine(SchedulerMachine):
    """Other engines compute prompts, and may succeed or fail at any time."""

    harness = DecodeHarness
    hands_over = True
    h: DecodeHarness

    @precondition(lambda self: self.h.open)
    @rule(data=st.data(), cached=st.integers(0, 4))
    def receive(self, data, cached):
        self.h.receive(data.draw(st.sampled_from(sorted(self.h.open))), cached)

    @precondition(lambda self: self.h.open)
    @rule(data=st.data(), verified_blocks=st.integers(0, 6), retry=st.booleans())
    def fail(self, data, verified_blocks, retry):
        self.h.fail(data.draw(st.sampled_from(sorted(self.h.open))), verified_blocks, retry)

    @rule(there=st.booleans())
    def prefill_pool(self, there):
        self.h.policy.replicas = None if there else []


class PrefillMachine(SchedulerMachine):
    """Prompts of other engines between requests of its own; decode may be done with one, or gone, at any time."""

    harness = PrefillHarness
    hands_over = True
    h: PrefillHarness

    @rule(prefix=prefixes, rest=rests, data=st.data(), seed=st.integers(0, 3), form=forms)
    def remote_request(self, prefix, rest, data, seed, form):
        self.count += 1
        size = self.h.config.block_size
        prompt = prefix + rest
        skip = data.draw(st.integers(0, (len(prompt) - 1) // size)) * size
        self.h.add_remote_prefill(f"r{self.count}", prompt, skip=skip, seed=seed, structured_outputs=form)

    @precondition(lambda self: self.h.remote_requests)
    @rule(data=st.data(), reason=st.sampled_from(["released", "cancelled", "expired"]))
    def close(self, data, reason):
        self.h.close(data.draw(st.sampled_from(sorted(self.h.remote_requests))), reason)

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            assert not self.h.remote_requests


RULES = settings(max_examples=examples(150), stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
TestDecodeScheduler = DecodeMachine.TestCase
TestPrefillScheduler = PrefillMachine.TestCase
TestScheduler.settings = TestDecodeScheduler.settings = TestPrefillScheduler.settings = RULES
