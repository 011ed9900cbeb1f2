"""Opens the configured drafter with weights."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.options.speculation import SpeculativeConfig
from engine.spec_decode.drafter import ModelDrafter
from engine.spec_decode.target import Target


def open_drafter(config: EngineConfig, target: Target) -> ModelDrafter | None:
    """Return the configured drafter with weights. None if there is none, or if this engine only computes prompts for
    others. Raises StartupError if its checkpoint is missing or does not fit."""
    speculative = drafting_options(config)
    if speculative is None:
        return None
    if speculative.method == "mtp":
        from engine.spec_decode.mtp import mtp_drafter

        return mtp_drafter(target)
    assert speculative.model is not None
    folder = resolve(speculative.model, weights=not target.dummy)
    if speculative.method == "eagle3":
        from engine.spec_decode.eagle3 import eagle3_drafter

        return eagle3_drafter(folder, target)
    from engine.spec_decode.draft_model import DraftModel

    return DraftModel(folder, target, config.max_num_batched_tokens)


def drafting_options(config: EngineConfig) -> SpeculativeConfig | None:
    """Return the options of the drafter with weights. None if there is none, or if this engine only computes prompts
    for others."""
    speculative, handoff = config.speculative_config, config.handoff
    if speculative is None or not speculative.has_weights or (handoff is not None and handoff.role == "prefill"):
        return None
    return speculative


def target_layers(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the drafter needs, in ascending order. Raises StartupError."""
    speculative = drafting_options(config)
    if speculative is None or speculative.method != "eagle3":
        return ()
    from engine.spec_decode.eagle3 import read_aux_layers

    assert speculative.model is not None
    return read_aux_layers(resolve(speculative.model, weights=config.load_format != "dummy"), model.num_layers)
