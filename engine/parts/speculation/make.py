"""Makes the speculation of an engine."""

from __future__ import annotations

from engine.model.state import DraftBound
from engine.parts.setup import Made, PartSetup
from engine.parts.speculation.speculator import Speculator, any_number
from engine.spec_decode.drafter import HostDrafter
from engine.spec_decode.ngram import NgramDrafter
from engine.spec_decode.suffix import SuffixDrafter


def make(setup: PartSetup) -> Made:
    loaded, config = setup.loaded, setup.loaded.config.speculative_config
    if config is None or loaded.model.head != "lm":
        return Made()
    drafter: HostDrafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        drafter = SuffixDrafter(config)
    recurrent = loaded.model.recurrent
    bound = any_number if recurrent is None else DraftBound(recurrent.kernel)
    costs, stages = setup.step_times.drafting.of, loaded.config.pipeline_parallel_size
    return Made([Speculator(config, drafter, costs, loaded.model.vocab_size, bound, stages=stages)])
