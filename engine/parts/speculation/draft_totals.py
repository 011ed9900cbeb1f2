"""Counts what became of drafts. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.wire.parts.speculation import SpecDecodeStats


@dataclass(slots=True)
class DraftTotals:
    """Counts since the start, as in SpecDecodeStats."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position += [0] * (drafted - len(per_position))
        for position in range(accepted):
            per_position[position] += 1

    def stats(self) -> SpecDecodeStats:
        return SpecDecodeStats(
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_accepted_tokens_per_pos=list(self.num_accepted_tokens_per_pos),
        )
