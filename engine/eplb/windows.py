"""Decides before which steps the load of experts is measured, and when experts move by it."""

from __future__ import annotations

from engine.options.experts import EPLBConfig


class Windows:
    """Counts the steps of an engine, or of engines that step together."""

    def __init__(self, config: EPLBConfig):
        self._config = config
        self._steps, self._moves_at = 0, config.window_size

    def next(self, may_move: bool) -> tuple[bool, bool]:
        """Count a step that is about to begin. Returns whether to measure the load before it, and whether to move
        experts by this load. may_move: whether experts can move, and none are moving."""
        steps = self._steps
        measure = steps > 0 and steps % self._config.window_size == 0
        move = measure and may_move and steps >= self._moves_at
        if move:
            self._moves_at = steps + self._config.step_interval
        self._steps += 1
        return measure, move
