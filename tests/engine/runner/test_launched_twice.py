"""Steps that are launched again, as after the loss of another engine: tokens and drafts stay what they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.core.engine import EngineCore
from engine.options.speculation import SpeculativeConfig
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.parts.states import StateStep
from tests.engine.spec_decode.draft_checkpoints import VOCAB, make_drafters
from tests.fake_drafter import draft_always
from tests.gpu.engines import Answer, make_core, requests, run
from tests.models import with_slow

NAMES = ("same_model", "noisy_model", "eagle3", "mtp", "hybrid_mtp")
SLOW = [name for name in NAMES if name != "mtp"]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    return cache(lambda: make_drafters(tmp_path_factory.mktemp("drafters")))


def launch_twice(core: EngineCore) -> None:
    """Launch every step, undo what Recovery undoes, and launch it again."""
    runner, launch = core.ranks.runner, core.ranks.runner.launch

    def twice(inputs: Any) -> Any:
        states = runner.memory.of.get(StateStep.part)
        kept = None if states is None else states.keep(inputs.plan)
        launch(inputs)
        if kept is not None:
            states.put_back(kept)
        return launch(inputs)

    runner.launch = twice  # type: ignore[method-assign]


@pytest.mark.parametrize("name", with_slow(NAMES, SLOW))
def test_a_drafter_with_weights_proposes_the_same_again(drafters, monkeypatch, name):
    draft_always(monkeypatch)
    folder, options = drafters()[name]
    wanted = requests(6, VOCAB, logprobs=1)
    speculative = SpeculativeConfig(**options, num_speculative_tokens=3)
    found: list[tuple[dict[str, Answer], int, int]] = []
    for again in (False, True):
        core = make_core(folder, "cpu", speculative_config=speculative, block_size=4, max_num_seqs=4, num_threads=1)
        if again:
            launch_twice(core)
        answers, drafts = run(core, wanted), core.stats().record(SpecDecodeStats)
        found.append((answers, drafts.num_draft_tokens, drafts.num_accepted_tokens))
        core.close()
    assert found[0] == found[1] and found[0][1] > 0
