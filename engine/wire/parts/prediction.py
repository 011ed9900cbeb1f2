"""What a client predicts as the output of a request."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from engine.wire.parts.part_record import PartRecord


class Prediction(PartRecord, frozen=True):
    """Tokens that the client predicts as the output; engines with speculative decoding use them as drafts."""

    part: ClassVar[str] = "speculation"

    tokens: list[int]

    def without_text(self) -> Self:
        return msgspec.structs.replace(self, tokens=[0] * len(self.tokens))
