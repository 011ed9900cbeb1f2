"""The end of a feature in an application. Its end in a model is a ModelPart (openai/served/model_part.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.middleware import Middleware

from deployments.http.route import Route
from deployments.openai.served.served_models import FurtherModels


class EdgePart:
    """All methods do nothing by default, so that a part overrides what it needs."""

    def routes(self) -> Sequence[Route]:
        return ()

    def further_models(self) -> FurtherModels | None:
        """Return models that requests may name besides those of the configuration."""
        return None

    def told(self) -> None:
        """The end of this part in another ingress has changed what they share."""

    def middleware(self) -> Sequence[Middleware]:
        """Return ASGI middleware that sees a request after its API key was checked."""
        return ()

    async def response_deleted(self, name: str) -> None:
        """A stored response with this id is deleted. Raises EngineUnavailable if a replica does not answer."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a block inside which the application lives, for what the part does besides answering requests."""
        return nullcontext()
