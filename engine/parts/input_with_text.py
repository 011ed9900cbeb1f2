"""Inputs that say more than a tape may say."""

from __future__ import annotations

from typing import Self

from engine.core.door.inputs import PartInput


class InputWithText(PartInput, frozen=True):
    def without_text(self) -> Self:
        """Return what a tape keeps of it, from which the part decides the same."""
        raise NotImplementedError
