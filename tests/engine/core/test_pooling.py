"""Requests that are pooled, beside those that generate."""

from __future__ import annotations

import numpy as np
import pytest

from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.block_pool import BlockPool
from engine.core.door.inputs import Added
from engine.core.door.kernel import ModelLimits
from engine.core.engine import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.errors import InvalidParameter, PromptTooLong, UnsupportedTask
from engine.parts.pooling.pooling import Pooling
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.pooling import PoolingParams
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from engine.wire.token_delta import TokenDelta
from tests.deltas import deltas_of
from tests.fake_runner import ALL_TASKS, Harness
from tests.models import make_model

PROMPTS = {name: [(7 * i + 3 * j) % 90 + 3 for j in range(5 + 4 * i)] for i, name in enumerate("abcdef")}
SCORE = PoolingParams(task="score", score_token_ids=[5, 6])
POOLING = {"b": PoolingParams(), "d": SCORE, "e": PoolingParams(dimensions=5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def core(request, folder):
    options = {
        "block_size": 4,
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 5,
        "num_threads": 1,
        "max_num_batched_tokens": 9,
    }
    core = build_engine(EngineConfig(model=str(folder), async_scheduling=request.param, **options))
    yield core
    core.close()


class Outputs:
    """What came of each request."""

    def __init__(self, core: EngineCore, salt: str = ""):
        self.core, self.salt = core, salt
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokenDelta] = {}

    def add(self, name: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        pooling = POOLING.get(name)
        self.core.add(
            GenerateRequest(request_id=name, prompt=PROMPTS[name], params=params, cache_salt=self.salt).asking(pooling)
        )
        self.tokens[name] = []

    def step(self) -> None:
        for event in self.core.step():
            self.tokens[event.delta.request_id] += event.delta.token_ids
            if event.delta.finish_reason:
                self.last[event.delta.request_id] = event.delta
        self.core.scheduler.check()

    def go(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.core.stats().blocks_used == 0

    def numbers(self, name: str) -> np.ndarray:
        return np.frombuffer(self.last[name].answer, dtype="<f4")


def alone(core: EngineCore) -> Outputs:
    outputs = Outputs(core, "not to be found in the cache by others")
    for name in PROMPTS:
        outputs.add(name)
        outputs.go()
    return outputs


def test_requests_that_generate_and_that_pool_share_steps_and_give_what_they_give_alone(core):
    expected, together = alone(core), Outputs(core)
    before = core.stats().steps
    for name in PROMPTS:
        together.add(name)
    together.go()
    assert together.tokens == expected.tokens
    for name in POOLING:
        np.testing.assert_allclose(together.numbers(name), expected.numbers(name), atol=1e-5)
        assert together.tokens[name] == []
        assert together.last[name].finish_reason == "stop"
    assert [len(together.numbers(name)) for name in POOLING] == [48, 1, 5]
    assert core.stats().steps - before < 30


def test_an_abort_of_either_kind_leaves_the_others_as_they_were(core):
    expected, together = alone(core), Outputs(core)
    for name in PROMPTS:
        together.add(name)
    together.step()
    for name in ("e", "c"):
        (event,) = core.abort(name)
        assert event.delta.finish_reason == "abort"
        assert event.delta.answer == b""
        core.scheduler.check()
        together.step()
    together.go()
    assert "e" not in together.last
    for name in ("a", "f"):
        assert together.tokens[name] == expected.tokens[name]
    for name in ("b", "d"):
        np.testing.assert_allclose(together.numbers(name), expected.numbers(name), atol=1e-5)


def test_a_slot_that_was_pooled_generates_again(core):
    expected, outputs = alone(core), Outputs(core)
    for name in "bababa":
        outputs.add(name)
        outputs.go()
        assert outputs.tokens[name] == expected.tokens[name]


def test_sampling_parameters_of_a_pooled_request_have_no_effect_not_even_a_form(tmp_path):
    model = make_model(tmp_path, "qwen3", tokenizer=True)
    core = build_engine(EngineConfig(model=str(model), num_gpu_blocks_override=40, num_threads=1))
    form = StructuredOutputsParams(regex="a{3}")
    for name, params in (("plain", SamplingParams()), ("form", SamplingParams(structured_outputs=form, logprobs=1))):
        core.add(GenerateRequest(request_id=name, prompt=PROMPTS["e"], params=params).asking(PoolingParams()))
    vectors = [delta.answer for delta in deltas_of(core)]
    core.close()
    assert len(vectors) == 2 and vectors[0] == vectors[1] != b""


def test_a_prompt_that_is_pooled_may_fill_the_context(core):
    longest = core.max_model_len
    core.check(GenerateRequest(request_id="a", prompt=[5] * longest).asking(PoolingParams()))
    with pytest.raises(PromptTooLong, match=f"> {longest} "):
        core.check(GenerateRequest(request_id="a", prompt=[5] * (longest + 1)).asking(PoolingParams()))
    with pytest.raises(PromptTooLong, match=f"> {longest - 1} .*the answer needs at least one"):
        core.check(GenerateRequest(request_id="a", prompt=[5] * longest))


@pytest.mark.parametrize("ids", [[], [5, 97]])
def test_a_score_of_a_generative_model_needs_two_tokens_of_its_vocabulary(core, ids):
    params = PoolingParams(task="score", score_token_ids=ids)
    with pytest.raises(InvalidParameter, match="score_token_ids must be two token ids below 97"):
        core.add(GenerateRequest(request_id="a", prompt=[5]).asking(params))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "dimensions must be at least 1, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be -1, or at least 1, got -2"),
        ({"score_token_ids": [1]}, "score_token_ids must be two token ids, or none"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(fields, message):
    with pytest.raises(InvalidParameter, match=message):
        PoolingParams(**fields)


def test_an_unsupported_task_survives_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(UnsupportedTask("generate", ["embed"])))
    assert str(error) == "this model cannot do 'generate'; it can do: embed"
    assert (error.status, error.code, error.param) == (400, "unsupported_task", "model")


# -- the scheduler alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_prompt_is_pooled_from_its_beginning(depth):
    h = Harness(num_blocks=10, max_model_len=40, depth=depth, max_num_batched_tokens=8)
    for i in range(3):
        h.add(f"g{i}", [1 + i, 2, 3], max_tokens=30)
        h.add(f"p{i}", [20 + i] * 15, pooling=PoolingParams())
    h.run()
    assert h.scheduler.totals.preemptions > 0
    assert all(h.finished[f"p{i}"].delta.finish_reason == "stop" for i in range(3))


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_all_of_it():
    config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    limits = ModelLimits(32, 50, chunked_prefill=False)
    kv_cache = KVCacheManager([SingleTypeKVCacheManager(BlockPool(64, 4, False))])
    scheduler = Scheduler(config, kv_cache, limits=limits, parts=[Pooling(ALL_TASKS)])
    for i, length in enumerate((20, 12, 1, 32, 31)):
        scheduler.apply(Added(GenerateRequest(request_id=str(i), prompt=[1] * length).asking(PoolingParams())), 0.0)
    counts = []
    while (plan := scheduler.schedule(0.0)) is not None:
        counts.append(plan.counts)
        scheduler.check()
    assert counts == [[1, 20], [12], [32], [31]], "the first, and the shortest that fit beside it"


def test_a_prefix_is_read_from_the_cache_unless_every_token_is_pooled():
    for pools_all_tokens, expected in ((False, 8), (True, 0)):
        h = Harness(num_blocks=64, max_model_len=64)
        h.scheduler.parts[Pooling].all_tokens = pools_all_tokens
        h.add("first", [3] * 10, max_tokens=1)
        h.run()
        h.add("second", [3] * 10, pooling=PoolingParams())
        h.run()
        assert h.finished["second"].delta.num_cached_tokens == expected
