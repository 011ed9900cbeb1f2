"""What a snapshot of a scheduler has of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.costs.draft_cost import DraftCost, ProposalCost, StepMean, VerifyingCost
from engine.model.state import DraftBound
from engine.options.speculation import SpeculativeConfig
from engine.parts.snapshot_kinds import NO_TOKEN, ORDINARY, SnapshotKinds
from engine.parts.speculation.draft_totals import DraftTotals
from engine.parts.speculation.speculator import Speculator, any_number
from engine.spec_decode.draft_length import SequenceDrafts, StepDrafts
from engine.wire.plan import ON_DEVICE


class NoDrafter:
    """Stands for a HostDrafter, and for the drafters that it makes."""

    def follow(self, tokens: list[int], cache_salt: str) -> NoDrafter:
        return self

    def propose(self, limit: int) -> Sequence[int]:
        raise AssertionError("what gives recorded answers is asked instead")

    def finish(self, tokens: list[int], num_prompt: int, cache_salt: str) -> None:
        pass


def of_drafts(drafts: SequenceDrafts) -> dict[str, Any]:
    proposed = [token if token == ON_DEVICE else ORDINARY if token >= 0 else NO_TOKEN for token in drafts.proposed]
    return {"prediction": [ORDINARY] if drafts.prediction else [], "proposed": proposed}


def of_speculator(part: Speculator) -> dict[str, Any]:
    return {"_drafter": None if part.has_weights else NoDrafter()}


KINDS = SnapshotKinds(
    objects=(
        DraftBound, DraftCost, DraftTotals, NoDrafter, ProposalCost, SequenceDrafts, Speculator, StepDrafts, StepMean,
        VerifyingCost,
    ),
    messages=(SpeculativeConfig,),
    constants={"any number": any_number},
    methods=((DraftCost, "of"),),
    changes={SequenceDrafts: of_drafts, Speculator: of_speculator},
)  # fmt: skip
