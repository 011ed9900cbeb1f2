"""Random work on engines of one, two and four ranks at once, with `determinism: strict`: whatever befalls a request, it
ends with the tokens and log-probabilities that it has alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.examples import examples
from tests.models import make_model
from tests.rank_pool import RankPool

SIZES = {"block_size": 4, "num_threads": 1, "determinism": "strict"}
ENGINES: list[dict[str, Any]] = [
    {"tensor_parallel_size": 1, "num_gpu_blocks_override": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64,
     "async_scheduling": True},
    {"tensor_parallel_size": 2, "num_gpu_blocks_override": 22, "max_num_seqs": 4,
     "max_num_batched_tokens": 9},  # it preempts
    {"tensor_parallel_size": 4, "num_gpu_blocks_override": 30, "max_num_seqs": 3, "max_num_batched_tokens": 16,
     "async_scheduling": True,
     "speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
]  # fmt: skip
PREFIX = [5 + 11 * i * i % 80 for i in range(24)]
PROMPTS = [[*PREFIX, 7, 8], [*PREFIX, 7, 8, 9, 10, 11], PREFIX[:13] + [3] * 30, [4], [9, 9, 12] * 4]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 7},
    {"seed": 8, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"seed": 9, "top_k": 5, "min_tokens": 6},
]
MAX_TOKENS = 14
ENGINE = st.integers(0, len(ENGINES) - 1)
WHICH = st.integers(0, 99)  # of those that run; how many that are depends on how fast engines are

Answer = list[tuple[int, float]]  # each token with its log-probability


@dataclass(slots=True)
class Live:
    """A request on one of the engines."""

    prompt: int
    params: int
    engine: int
    answer: Answer = field(default_factory=list)


def make_request(prompt: int, params: int) -> GenerateRequest:
    chosen = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, **PARAMS[params])
    return GenerateRequest(request_id="alone", prompt=PROMPTS[prompt], params=chosen)


def entries(delta: Any) -> Answer:
    assert delta.error is None, delta.error
    return [(entry.token_id, entry.logprob) for entry in delta.logprobs or []]


@dataclass
class World:
    """Engines that are started once, and the answers of one that is given a single request at a time."""

    cores: list[EngineCore]
    alone: EngineCore

    def __post_init__(self) -> None:
        self.expected = cache(self._expected)

    def _expected(self, prompt: int, params: int) -> Answer:
        self.alone.add(make_request(prompt, params))
        answer: Answer = []
        while self.alone.has_work:
            answer += [entry for event in self.alone.step() for entry in entries(event.delta)]
        return answer


class StrictMachine(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Live] = {}  # by request id
        self.finished: list[Live] = []
        self.count = 0

    @rule(
        engine=ENGINE,
        prompt=st.integers(0, len(PROMPTS) - 1),
        params=st.integers(0, len(PARAMS) - 1),
    )
    def add(self, engine: int, prompt: int, params: int) -> None:
        self.start(Live(prompt, params, engine))

    def start(self, live: Live) -> None:
        self.count += 1
        name, prompt = f"r{self.count}", PROMPTS[live.prompt]
        self.live[name] = live
        known = {"prompt": prompt + [token for token, _ in live.answer], "num_prompt": len(prompt)}
        request = msgspec.structs.replace(make_request(live.prompt, live.params), request_id=name, **known)
        self.world.cores[live.engine].add(request)

    @rule(engine=ENGINE, steps=st.integers(1, 6))
    def step(self, engine: int, steps: int) -> None:
        core = self.world.cores[engine]
        for _ in range(steps):
            for event in core.step() if core.has_work else ():
                live = self.live.get(event.delta.request_id)
                if live is None:
                    continue  # it was killed while a step computed it
                live.answer += entries(event.delta)
                if event.delta.finish_reason is not None:
                    self.finished.append(self.live.pop(event.delta.request_id))
            core.scheduler.check()

    @rule(which=WHICH)
    def kill(self, which: int) -> None:
        self.abort(which)

    @rule(which=WHICH, engine=ENGINE)
    def move(self, which: int, engine: int) -> None:
        """Move it as the death of its replica does: another one goes on after the tokens that are known."""
        live = self.abort(which)
        if live is not None:
            live.engine = engine
            self.start(live)

    def abort(self, which: int) -> Live | None:
        if not self.live:
            return None
        name = list(self.live)[which % len(self.live)]
        live = self.live.pop(name)
        self.world.cores[live.engine].abort(name)
        return live

    @rule(engine=ENGINE)
    def forget_prefixes(self, engine: int) -> None:
        if not self.world.cores[engine].has_work:
            self.world.cores[engine].scheduler.kv_cache.pool.clear_cache()

    def teardown(self) -> None:
        for engine, core in enumerate(self.world.cores):
            while core.has_work:
                self.step(engine, 1)
        assert not self.live
        for live in self.finished:
            assert live.answer == self.world.expected(live.prompt, live.params)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[RankPool]]:
    """The rank pools of the engines with several ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield [stack.enter_context(RankPool()) for _ in ENGINES]
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_a_request_has_the_bits_that_it_has_alone_whatever_befalls_it(
    pools: list[RankPool], tmp_path: Path, family: str, dtype: str
) -> None:
    common = {"model": str(make_model(tmp_path, family)), "dtype": dtype, **SIZES}
    single = {"tensor_parallel_size": 1, "num_gpu_blocks_override": 40, "enable_prefix_caching": False}
    with ExitStack() as stack:
        configs = [EngineConfig(**common, **options) for options in (*ENGINES, single)]
        *cores, alone = (
            stack.enter_context(pool.engine(config)) for pool, config in zip([*pools, RankPool()], configs, strict=True)
        )

        class Machine(StrictMachine):
            world = World(cores, alone)

        limits = settings(
            max_examples=examples(16),
            stateful_step_count=30,
            derandomize=True,
            phases=[Phase.generate],  # engines remember prefixes of earlier examples, so that none can be shortened
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        run_state_machine_as_test(Machine, settings=limits)
        assert any(core.stats().preemptions for core in cores)
        assert all(core.stats().prefix_hit_tokens for core in cores)
