"""Makes the grammars of an engine."""

from __future__ import annotations

from engine.grammars.compiler import GrammarCompiler
from engine.parts.grammar.grammar_courier import GrammarCourier
from engine.parts.grammar.grammars import Grammars
from engine.parts.setup import Made, PartSetup


def make(setup: PartSetup) -> Made:
    loaded, grammars = setup.loaded, Grammars()
    compiler = GrammarCompiler(
        loaded.folder,
        loaded.model.vocab_size,
        frozenset(loaded.model.eos_token_ids),
        closed=loaded.config.structured_outputs.disable_additional_properties,
    )
    return Made([grammars], [GrammarCourier(grammars, compiler)])
