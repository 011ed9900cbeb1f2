"""Opens the configured drafter with weights."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model.checkpoint.folder import resolve
from engine.spec_decode.drafter import ModelDrafter
from engine.spec_decode.target import Target


def open_drafter(config: EngineConfig, target: Target) -> ModelDrafter | None:
    """Return the configured drafter with weights. None if there is none, or if this engine only computes prompts for
    others. Raises StartupError if its checkpoint is missing or does not fit."""
    speculative, handoff = config.speculative, config.handoff
    if speculative is None or not speculative.has_weights or (handoff is not None and handoff.role == "prefill"):
        return None
    if speculative.method == "mtp":
        from engine.spec_decode.mtp import mtp_drafter

        return mtp_drafter(target)
    assert speculative.model is not None
    folder = resolve(speculative.model, weights=not target.dummy)
    if speculative.method == "eagle3":
        from engine.spec_decode.eagle3 import eagle3_drafter

        return eagle3_drafter(folder, target)
    if speculative.method == "medusa":
        from engine.spec_decode.medusa import MedusaDrafter

        return MedusaDrafter(folder, target, speculative.num_speculative_tokens)
    from engine.spec_decode.draft_model import DraftModel

    return DraftModel(folder, target, config.max_num_batched_tokens)
