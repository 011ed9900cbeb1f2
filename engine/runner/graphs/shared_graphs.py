"""The graphs of engines that share experts: in a step of all engines, either all replay one, or none does.

An exchange that a graph holds has the same number of rows on every rank. So engines tell each other the sizes of their
steps, and all choose a shape with the same number of tokens, which holds the step of each. The shapes may differ
otherwise: one engine verifies drafts while another only decodes. An engine without a step replays a graph of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from engine.runner.graphs.cuda_graphs import CudaGraphs, StepShape


class SharedGraphs(CudaGraphs):
    """Captured graphs of one rank, the same as those of all ranks of all engines."""

    def capture(self, shapes: Sequence[StepShape]) -> None:
        super().capture(shapes)
        self._padding = {shape: self._inputs(shape) for shape in self.captured}

    def shape_for(self, tokens: int, seqs: int, longest: int) -> StepShape | None:
        """Return None, because a shape is chosen only when engines begin the step."""
        return None

    def agreed(self, sizes: Sequence[tuple[int, int, int] | None], engine: int) -> StepShape | None:
        """Return the shape that an engine uses in a step of all engines; None if all compute it without graphs. sizes:
        of each engine's step (tokens, sequences, tokens of the longest sequence, 0 if no graph can compute it); None
        for an engine without a step."""
        steps = [size for size in sizes if size is not None]
        if not all(longest for _, _, longest in steps):
            return None
        for _, same in groupby(self.captured, key=lambda shape: shape.tokens):
            shapes = list(same)
            if all(any(shape.holds(*step) for shape in shapes) for step in steps):
                return next(shape for shape in shapes if shape.holds(*(sizes[engine] or (0, 0, 0))))
        return None

    def run_empty(self, shape: StepShape) -> None:
        """Compute a step without tokens."""
        self.run(shape, self._padding[shape])
