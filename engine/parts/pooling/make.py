"""Makes the pooling of an engine."""

from __future__ import annotations

from engine.parts.pooling.pooling import Pooling
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    model = setup.loaded.model
    vocab_size = model.vocab_size if model.head == "lm" else None
    return Made([Pooling(model.supported_tasks, vocab_size=vocab_size, all_tokens=model.pooling.type != "last")])
