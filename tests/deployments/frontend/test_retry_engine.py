"""Replay with a real engine, which goes on with the attempt that was given up: it was only thought dead."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from deployments.frontend import retry
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import ReplicaStatus
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest
from engine.wire.part_record import encoded
from engine.wire.parts.thinking_budget import ThinkingBudget
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.handoff_stats import PeerPool
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.deployments.fake_api import until
from tests.deployments.real_api import running_engine
from tests.deployments.replicas.mortal_pool import Heard, Outcome, ingress, listen

PROMPT = list(range(20, 40))
FORM = StructuredOutputsParams(regex="[a-z]{3}( [a-z]{2,5}){4}!")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded with penalties": {"seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "seed from the id, few candidates": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "with a budget of reasoning": {"seed": 6, "extra_args": encoded(ThinkingBudget(5, close=77))},
    "of a form": {"structured_outputs": FORM, "max_tokens": 64, "min_tokens": 0, "ignore_eos": False},
}
QUICK = ("of a form",)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(retry, "BACK_OFF_S", 0.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 100))


class UnsurePool:
    """Calls fail on cue, while the engine lives on. breaks: for each attempt, how many tokens the client has by then; a
    fast engine may have come to the end before that is noticed."""

    def __init__(self, replica: EngineReplica, breaks: list[int]):
        self.heard: dict[str, Heard] = {}
        self.attempts: list[GenerateRequest] = []
        self.calls: list[asyncio.Task[None]] = []
        self._replica, self._breaks = replica, list(breaks)

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        self.attempts.append(request)
        call = asyncio.create_task(self._replica.run_request(EncodedRequest.of(request)))
        self.calls.append(call)
        if self._breaks:
            tokens = self._breaks.pop(0)
            while not call.done():
                if any(len(heard.token_ids) >= tokens for heard in self.heard.values()):
                    raise EngineUnavailable("it does not answer")
                await asyncio.sleep(0)
        await call

    async def statuses(self) -> list[ReplicaStatus]:
        return [self._replica.status()]

    async def asleep(self) -> bool:
        return False

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


def request(**params: Any) -> GenerateRequest:
    params = {"max_tokens": 40, "min_tokens": 30, "ignore_eos": True, "logprobs": 2, "stop": ["zz"], **params}
    return GenerateRequest(request_id="a", prompt=PROMPT, params=SamplingParams(**params), timeout_s=60.0)


async def outcome(replica: EngineReplica, asked: GenerateRequest, breaks: list[int]) -> tuple[Outcome, UnsurePool]:
    async with ingress() as one:
        pool = UnsurePool(replica, breaks)
        found = await listen(one.generation([asked], pool), [asked], pool.heard)
        await asyncio.gather(*pool.calls)
        return found, pool


@pytest.mark.parametrize(
    "params",
    [pytest.param(params, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, params in CASES.items()],
)
async def test_engine_that_was_thought_dead_changes_nothing(folder, params):
    async with running_engine(folder, "decode-1") as (_, replica):
        asked = request(**params)
        expected, _ = await outcome(replica, asked, [])
        (whole,) = expected.heard
        tokens = len(whole.token_ids)
        assert tokens > 10
        assert len(set(whole.token_ids)) > 5
        attempts = 0
        for breaks in ([0], [1], [7], [tokens // 2], [0, 3, 9]):
            found, pool = await outcome(replica, asked, breaks)
            (heard,) = found.heard
            assert (heard.text, heard.token_ids, heard.offsets) == (whole.text, whole.token_ids, whole.offsets)
            assert (heard.finish_reason, heard.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert [p.logprob for p in heard.logprobs] == pytest.approx([p.logprob for p in whole.logprobs], abs=1e-4)
            assert found.usage.completion_tokens == tokens
            assert found.usage.cached_tokens < len(PROMPT)
            attempts += len(pool.attempts)
        assert attempts >= 5 + 2, "nothing was replayed"
        await until(lambda: replica.status().stats.blocks_used == 0)
