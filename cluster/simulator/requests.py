"""From a line of a trace to what an engine is sent."""

from __future__ import annotations

from functools import lru_cache

from cluster.simulator.trace import Trace
from engine.wire.messages import GenerateRequest
from engine.wire.sampling_params import SamplingParams


def make_request(trace: Trace, index: int) -> GenerateRequest:
    """Its id is the index."""
    return GenerateRequest(
        request_id=str(index), prompt=trace.prompt(index), params=_params(int(trace.output_tokens[index]))
    )


@lru_cache(maxsize=4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)
