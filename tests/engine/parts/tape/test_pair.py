"""Tapes of a real prefill engine and a real decode engine."""

from __future__ import annotations

import random

import msgspec

from cluster.lab.tape.replay import Replay
from engine.config import EngineConfig
from engine.options.handoff import HandoffConfig
from engine.parts.tape.engine_tape import EngineTape, tape_with_key
from tests.engine.kv_transfer.pair import Engine, Pair
from tests.engine.parts.tape.taped import KEY
from tests.rank_pool import RankPool


def make_config(role: str, **options) -> EngineConfig:
    defaults = {
        "dtype": "float32",
        "block_size": 16,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 3,
        "num_threads": 1,
        "tape_mib": 16,
    }
    handoff = HandoffConfig(role=role, policy="always", transport="tcp")
    return EngineConfig(**{"tape_mib": 16, **defaults, **options, "handoff": handoff})


def replayed(engine: Engine) -> Replay:
    tape = msgspec.msgpack.decode(tape_with_key(engine.server._core.journal.take(), KEY), type=EngineTape)
    replay = Replay(tape)
    for _ in replay.run():
        replay.scheduler.check()
    assert replay.scheduler.totals == engine.scheduler.totals
    return replay


def test_prompts_that_another_engine_computes_are_decided_again_in_both_engines():
    configs = make_config("decode"), make_config("prefill", max_num_batched_tokens=64)
    with RankPool() as first, RankPool() as second, Pair(*configs, (first, second)) as pair:
        rng = random.Random(0)
        shared = rng.choices(range(3, 4096), k=100)
        for i in range(6):
            pair.ingress.add(f"r{i}", shared + rng.choices(range(3, 4096), k=5 + 20 * i), max_tokens=30)
        for i in range(6):
            assert len(pair.ingress.tokens(f"r{i}")) == 30
        pair.settle()
        decode, prefill = replayed(pair.decode), replayed(pair.prefill)
    kinds = {type(moment.input).__name__ for moment in decode.moments}
    assert {"AddedShape", "ReceivedShape"} <= kinds and decode.tape.role == "decode"
    kinds = {type(moment.input).__name__ for moment in prefill.moments}
    assert {"AddedRemoteShape", "ClosedShape"} <= kinds and prefill.tape.role == "prefill"
