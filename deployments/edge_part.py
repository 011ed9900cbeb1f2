"""The ends of a feature at the HTTP edge. All methods do nothing by default, so that a part overrides what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from deployments.frontend.sequence_observer import SequenceObserver, SequenceView
from deployments.http.route import Route


class EdgePart:
    """The end of a feature in an application."""

    def routes(self) -> Sequence[Route]:
        return ()

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a block inside which the application lives, for what the part does besides answering requests."""
        return nullcontext()


class ModelPart:
    """The end of a feature in a model that an application serves."""

    def observer(self, sequence: SequenceView) -> SequenceObserver | None:
        """Return what observes a sequence, or None for one that it does not observe."""
        return None
