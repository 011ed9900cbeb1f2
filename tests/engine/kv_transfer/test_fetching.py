"""Prompts that begin with KV from another engine's prefix cache: the client sees the tokens of one engine alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.parts.handoffs.handoff_courier import HandoffCourier
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.parts.kv_fetching import FetchStats, KVHolder
from engine.wire.parts.kv_offload import KVOffloadStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenLogprob
from tests.engine.kv_transfer.pair import Engine, Pair
from tests.engine.kv_transfer.test_moves import alone, prompt
from tests.engine_sockets import Ingress
from tests.models import make_model
from tests.products import in_turns, pairwise, slow
from tests.rank_pool import RankPool

LENGTH = 200
FAMILIES = ("gemma3", "qwen3_5", "deepseek_v3", "kimi_linear", "gpt_oss", "nemotron_h")
SHORT = {"lease_s": 1.0, "heartbeat_s": 0.2, "accept_s": 1.0, "progress_s": 1.0}  # waits of fetches that fail


def make_config(
    model: Path | str, fetching: bool = True, waits: dict[str, float] | None = None, **options: Any
) -> EngineConfig:
    sizes = {
        "block_size": 16,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    handoff = HandoffConfig(role="replica", transport="tcp", enable_prefix_fetching=True, **(waits or {}))
    return EngineConfig(
        **{"model": str(model), "dtype": "float32", **sizes, **options, "handoff": handoff if fetching else None}
    )


class Caches(Pair):
    """Two engines, `here` and `there`; the test plays the router."""

    def __init__(self, here: EngineConfig, there: EngineConfig, ranks: tuple[RankPool, RankPool]):
        super().__init__(here, there, ranks)
        self.here, self.there = self.decode, self.prefill
        self._ingresses = {self.here: self.ingress, self.there: Ingress(self._context, self.there.server)}
        self.requests: list[GenerateRequest] = []
        self.answers: list[tuple[list[int], list[TokenLogprob]]] = []
        self.notes: list[str] = []

    def start(
        self, engine: Engine, tokens: list[int], holder: Engine | None = None, held: int = 10_000, **more: Any
    ) -> str:
        """held: tokens that the router believes the holder to have."""
        name = f"r{len(self.requests)}"
        peer = None if holder is None else holder.server._core.mail[HandoffCourier].channel.peer
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, logprobs=0, **{"max_tokens": 12, **more.pop("params", {})}
        )
        request = GenerateRequest(request_id=name, prompt=tokens, params=params, **more)
        self.requests.append(request)
        self._ingresses[engine].send(
            Add(GenerateRequest(request_id=name, prompt=tokens, params=params, **more,
                reply_to=self._ingresses[engine].address).asking(peer and KVHolder(peer, held)))
        )  # fmt: skip
        return name

    def end(self, engine: Engine, name: str) -> int:
        """Return the prompt tokens that the engine found cached."""
        deltas = []
        while not deltas or not deltas[-1].finish_reason:
            deltas += [delta for delta in self._ingresses[engine].receive().deltas if delta.request_id == name]
        self.answers.append(
            (
                [token for delta in deltas for token in delta.token_ids],
                [entry for delta in deltas for entry in delta.logprobs or []],
            )
        )
        self.notes = [event.what for delta in deltas for event in delta.timeline]
        return sum(delta.num_cached_tokens for delta in deltas)

    def ask(
        self, engine: Engine, tokens: list[int], holder: Engine | None = None, held: int = 10_000, **more: Any
    ) -> int:
        return self.end(engine, self.start(engine, tokens, holder, held, **more))

    def check(self, config: EngineConfig) -> None:
        assert self.answers == alone(config, self.requests)
        self.settle()


@pytest.mark.parametrize(
    ("family", "dtype"),
    pairwise(["llama"], ["float32", *slow(["bfloat16"])]) + in_turns(slow(FAMILIES), ["float32", "bfloat16"]),
)
def test_a_prompt_that_continues_one_of_another_engine_has_the_same_bits(tmp_path, ranks, family, dtype):
    config = make_config(make_model(tmp_path, family), dtype=dtype)
    with Caches(config, config, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        turn = prompt(LENGTH) + caches.answers[0][0] + [5, 6, 7]
        cached = caches.ask(caches.here, turn, holder=caches.there)
        assert cached >= LENGTH // 64 * 64
        assert caches.ask(caches.here, [*turn, 8]) >= cached, "fetched blocks are cached like all others"
        stats = caches.here.server._core.stats()
        assert (stats.record(FetchStats).fetches, stats.record(FetchStats).fetched_tokens) == ({"received": 1}, cached)
        caches.check(make_config(config.model, fetching=False, dtype=dtype))


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("llama", 1),
        *(
            pytest.param(family, stages, marks=pytest.mark.slow)
            for family, stages in (("gemma3", 1), ("qwen3_5", 1), ("llama", 2), ("gemma3", 2))
        ),
    ],
)
def test_what_the_other_engine_has_in_a_tier_only_comes_up_and_is_fetched(tmp_path, ranks, family, stages):
    config = make_config(make_model(tmp_path, family), pipeline_parallel_size=stages, kv_offloading_size=0.1)
    with Caches(config, config, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        caches.settle()
        caches.wait_for(lambda: caches.there.scheduler.parts[KVOffloading].flushed())
        caches.there.scheduler.kv_cache.clear_cache()
        turn = prompt(LENGTH) + caches.answers[0][0] + [5, 6, 7]
        cached = caches.ask(caches.here, turn, holder=caches.there)
        assert cached >= LENGTH // 64 * 64
        stats = caches.here.server._core.stats()
        assert (stats.record(FetchStats).fetches, stats.record(FetchStats).fetched_tokens) == ({"received": 1}, cached)
        loaded = caches.there.server._core.stats().record(KVOffloadStats)
        assert loaded is not None and loaded.tiers["host"].read_bytes > 0
        caches.check(make_config(config.model, fetching=False))


@pytest.mark.slow
def test_what_the_other_engine_has_not_is_computed(ranks):
    """It has a part or nothing, or is this engine itself."""
    config = make_config("pocket", waits=SHORT)
    with Caches(config, config, ranks) as caches:
        caches.ask(caches.there, prompt(100))
        assert caches.ask(caches.here, prompt(100)[:96] + prompt(LENGTH), holder=caches.there) == 96
        assert caches.ask(caches.here, prompt(LENGTH)[1:], holder=caches.there) == 0
        assert caches.ask(caches.here, prompt(LENGTH)[2:], holder=caches.here) == 0
        assert caches.here.server._core.stats().record(FetchStats).fetches == {"received": 1, "failed": 1}
        caches.check(make_config("pocket", fetching=False))


def test_an_engine_of_another_dtype_is_refused(ranks):
    configs = make_config("pocket", waits=SHORT), make_config("pocket", waits=SHORT, dtype="bfloat16")
    with Caches(*configs, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        caches.answers.clear()
        caches.requests.clear()
        assert caches.ask(caches.here, prompt(LENGTH), holder=caches.there) == 0
        assert any("is not that of this engine" in note for note in caches.notes)
        caches.check(make_config("pocket", fetching=False))


def test_an_engine_that_lets_no_other_fetch_says_so(ranks):
    config = make_config("pocket", waits=SHORT)
    handoff = HandoffConfig(role="replica", transport="tcp", move_requests=True)
    with Caches(config, replace(config, handoff=handoff), ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        assert caches.ask(caches.here, prompt(LENGTH), holder=caches.there) == 0
        assert any("no other engine may fetch" in note for note in caches.notes)
        caches.check(make_config("pocket", fetching=False))


def test_salts_are_kept_apart(ranks):
    config = make_config("pocket", waits=SHORT)
    with Caches(config, config, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH), cache_salt="a")
        assert caches.ask(caches.here, prompt(LENGTH), holder=caches.there, cache_salt="b") == 0
        assert caches.ask(caches.here, prompt(LENGTH), holder=caches.there, cache_salt="a") == LENGTH // 16 * 16
        caches.check(make_config("pocket", fetching=False))


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 2)])
def test_engines_of_other_sizes_fetch_from_each_other(tmp_path, ranks, here, there):
    folder, options = make_model(tmp_path, "llama"), {"determinism": "strict"}
    with Caches(
        *(make_config(folder, tensor_parallel_size=size, **options) for size in (here, there)), ranks
    ) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        assert caches.ask(caches.here, [*prompt(LENGTH), 7], holder=caches.there) == LENGTH // 16 * 16
        caches.check(make_config(folder, fetching=False, **options))


def test_a_decode_engine_fetches_before_it_asks_a_prefill_engine(ranks):
    config = make_config("pocket", waits=SHORT)
    assert config.handoff is not None
    decode = replace(config, handoff=replace(config.handoff, role="decode", policy="never"))
    with Caches(decode, config, ranks) as caches:
        caches.ask(caches.there, prompt(LENGTH))
        assert caches.ask(caches.here, [*prompt(LENGTH), 7], holder=caches.there) == LENGTH // 16 * 16
        assert caches.here.server._core.stats().record(HandoffTotals).prefill_decisions == {"local": {"policy": 1}}
        caches.check(make_config("pocket", fetching=False))
