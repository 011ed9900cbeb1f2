"""The tiers below the KV cache of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import msgspec

from engine.config import EngineConfig
from engine.kv_offload.rank_tiers import RankTiers, open_tiers
from engine.kv_offload.tier_worker import num_answers
from engine.kv_transfer.fingerprint import fingerprint
from engine.runner.layer_runner import LayerRunner, Run
from engine.runner.rank_part import RankPart
from engine.runner.rank_setup import RankSetup
from engine.runner.step import StepMemory
from engine.wire.parts.kv_offload import TierAnswer, TierCommand

DECODER = msgspec.msgpack.Decoder(TierCommand)


class KVTiers(RankPart):
    name = "kv_tiers"
    tiers: RankTiers

    def __init__(self, setup: RankSetup):
        self._setup = setup
        self._opened = ExitStack()
        self._awaited = 0

    @property
    def busy(self) -> bool:
        return self._awaited > 0

    def allocate(self, memory: StepMemory) -> None:
        self._memory = memory

    def start(self, run: Run, runner: LayerRunner) -> None:
        setup, config = self._setup, self._setup.config.of(EngineConfig)
        dtypes = setup.dtype, setup.kv_dtype
        scope = fingerprint(setup.whole, setup.folder, *dtypes, setup.block_size, config.determinism, setup.tp.size)
        scope += f"{setup.layout} load_format={config.load_format} torch_compile={config.torch_compile}"
        self.tiers = open_tiers(config, self._memory.blocks, setup.tp.all_ranks, scope, self._opened)

    def obey(self, command: msgspec.Raw) -> None:
        decoded: TierCommand = DECODER.decode(command)
        self.tiers.worker.submit(decoded)
        self._awaited += num_answers(decoded)

    def answers(self) -> Iterable[TierAnswer]:
        found = self.tiers.worker.answers()
        self._awaited -= len(found)
        return found

    def close(self) -> None:
        self._opened.close()
