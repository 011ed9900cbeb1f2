"""Divides the running requests over the steps that fill the stages of a pipeline. Pure Python."""

from __future__ import annotations

from engine.core.door.part import Part
from engine.core.request import Request

LEAST_CHUNK = 256
"""Fewest tokens into which a prompt is cut to fill a pipeline: each chunk reads all weights. A guess,
which `python -m benchmarks.pipeline_stages chunks` measures on a CPU."""


class MicroBatches(Part):
    """Token limit of an engine with pipeline stages.

    A request waits while a step in flight samples its next token. A step samples for at most 1 / stages of the running
    requests, so that the others fill the steps that follow, and every stage has a step. A prompt is cut into
    2 * stages chunks, unless they would be small, so that stages compute its chunks at the same time. Chunks that
    sample nothing do not count: otherwise those of a long prompt would keep out all requests behind it. Nor do prompts
    with images: an image that waits for room in the encoder cache would keep out the request that has to free it.
    """

    def __init__(self, stages: int, whole_image: int = 0):
        """whole_image: tokens of an image that must be in one step; 0 if an image can be in several."""
        self._stages, self._whole_image = stages, whole_image
        self._left = 1  # requests for which this step may still sample

    def start_step(self, sequences: int) -> None:
        self._left = max(1, -(-sequences // self._stages))

    def up_to(self, request: Request, count: int) -> int:
        if request.in_flight or count <= 0:
            return 0
        share = -(-len(request.tokens) // (2 * self._stages))
        chunk = min(count, max(LEAST_CHUNK, self._whole_image, share))
        if chunk < request.pending or (request.prefix.places and request.computed < request.prefix.places[-1][1]):
            return chunk
        if not self._left:
            return 0
        self._left -= 1
        return chunk
