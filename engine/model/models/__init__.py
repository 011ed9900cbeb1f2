"""One file per model family."""

from engine.model.models.registry import build_model

__all__ = ["build_model"]
