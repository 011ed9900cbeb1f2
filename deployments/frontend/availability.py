"""Records whether a model has a healthy replica, as last seen by one ingress."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class Availability:
    """Whether a model is up. Logs each change once, however often it is reported."""

    def __init__(self, model: str):
        self.was_up = False
        """Whether there has been a healthy replica. If not, the model is still starting."""
        self._model = model
        self._down_since: float | None = None

    @property
    def is_down(self) -> bool:
        """Whether a request has found no replica, and no replica has been seen since."""
        return self._down_since is not None

    def report_up(self) -> None:
        if self._down_since is not None:
            logger.info("a replica is up model=%s after_s=%.1f", self._model, time.monotonic() - self._down_since)
        self.was_up, self._down_since = True, None

    def report_down(self) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            level, yet = (logging.WARNING, "") if self.was_up else (logging.INFO, " yet")  # a start may take long
            logger.log(level, "no replica is up%s; requests wait model=%s", yet, self._model)
