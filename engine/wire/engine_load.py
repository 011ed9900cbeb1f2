"""Load of an engine, as routers see it."""

from __future__ import annotations

import msgspec


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one engine, by which routers and control actors choose. All fields are 0 if nothing is known about the
    engine."""

    sequences: int = 0
    """Sequences that are running, waiting, or waiting for KV; each needs one of `slots` to run."""
    queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    blocks_used: int = 0
    slots: int = 0
    blocks_total: int = 0
    queued_embeds: int = 0
    """Image embeddings that the vision encoder still has to compute."""
    adapters: tuple[str, ...] = ()
    """Digests of the LoRA adapters in slots."""
