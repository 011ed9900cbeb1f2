"""What `manta check` and `manta doctor` find out about a feature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.cli.check.finding import Finding
from cluster.config.model_section import ModelSection
from deployments.routing.config import Role


class PartCheck:
    """All methods find nothing by default, so that a feature overrides what it needs."""

    def configuration(self, serve_config: Mapping[str, Any]) -> Iterable[Finding]:
        """Return warnings about a Serve configuration. Raises StartupError for what does not fit its model."""
        return ()

    def pool(self, model: ModelSection, role: Role, topic: str) -> tuple[int, Iterable[Finding]]:
        """Return the bytes per rank that the feature adds to a model's weights, and findings about it. topic: of
        findings about the pool."""
        return 0, ()
