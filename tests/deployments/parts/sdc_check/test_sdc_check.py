"""Answers of two real engines, computed again by each other; one of them gets a wrong bit."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.availability import Availability
from deployments.frontend.generation import LiveGeneration
from deployments.frontend.sequence_context import SequenceContext
from deployments.frontend.token_channel import TokenChannel
from deployments.observability.telemetry import Telemetry
from deployments.parts.sdc_check import sdc_check
from deployments.parts.sdc_check.sdc_check import MANY, SampledAnswer, SdcCheck, far_difference
from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.pools import ReplicaStatus
from engine.config import EngineConfig
from engine.errors import EngineUnavailable
from engine.serving.server import EngineServer
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Command
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.handoff_stats import PeerPool
from engine.wire.token_delta import TokenLogprob
from tests.deployments.fake_api import tokenizer, until
from tests.docs.pages import block
from tests.engine_sockets import ServerThread

EVERY = 3


class Replicas:
    """An EnginePool of several engines, which answer in turn."""

    def __init__(self, servers: dict[str, tuple[EngineServer, EngineReplica]]):
        self.servers = servers
        self.answers: list[tuple[str, GenerateRequest]] = []

    async def generate(self, *requests: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        names = [name for name in self.servers if name not in avoid] or [*self.servers]
        name = names[len(self.answers) % len(names)]
        self.answers.append((name, requests[0]))
        await self.servers[name][1].run_requests([EncodedRequest.of(request) for request in requests])

    async def statuses(self) -> list[ReplicaStatus]:
        return [replica.status() for _, replica in self.servers.values()]

    async def asleep(self) -> bool:
        return False

    async def tell(self, command: Command, peers: bool = False) -> None: ...

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}


class Serving:
    def __init__(self, pool: Replicas, frontend: SequenceContext):
        self.pool, self.frontend = pool, frontend
        self._number = 0

    async def ask(self, max_tokens: int = 6, **params: Any) -> None:
        self._number += 1
        request = GenerateRequest(
            request_id=f"request-{self._number}",
            prompt=[5, 6, 7, 8, self._number],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
            reply_to=self.frontend.channel.address,
        )
        async for chunk in LiveGeneration(self.frontend, [[request]], "client").chunks():
            assert (chunk.logprobs is None) == ("logprobs" not in params)

    @property
    def checks(self) -> dict[str, int]:
        return self.frontend.stats.sdc_checks


@asynccontextmanager
async def serving(
    folder: Path, names: tuple[str, ...] = ("one", "two"), *, exact: bool = True
) -> AsyncGenerator[Serving]:
    telemetry = Telemetry("ingress-1", None)
    channel, servers, threads = TokenChannel("127.0.0.1", telemetry.stats), {}, []
    tasks = [asyncio.create_task(channel.run())]
    config = EngineConfig(
        model=str(folder),
        block_size=4,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        num_threads=1,
        async_scheduling=False,
    )
    for name in names:
        replica = EngineReplica("127.0.0.1", stall_timeout_s=60)
        server = EngineServer(config, engine_id=name, status_to=replica.status_to)
        replica.connect(server.address)
        servers[name] = (server, replica)
        tasks.append(asyncio.create_task(replica.run()))
        threads.append(ServerThread(server))
    pool, stats = Replicas(servers), telemetry.stats.model("tiny")
    limits = AdmissionLimits(max_num_seqs=4, num_engines=2, num_ingresses=1, max_waiting=8, max_waiting_tokens=1000)
    admission = Admission(pool, limits, stats, Availability("tiny"))
    check = SdcCheck(EVERY, pool, channel, admission, stats, exact=exact)
    frontend = SequenceContext(
        model="tiny",
        tokenizer=tokenizer(),
        channel=channel,
        pool=pool,
        admission=admission,
        stats=stats,
        timelines=telemetry.timelines,
        max_replays=3,
        observers=(check.observer,),
    )
    try:
        await until(lambda: _reports(pool), 30)
        yield Serving(pool, frontend)
    finally:
        for thread in threads:
            thread.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reports(pool: Replicas) -> bool:
    with suppress(EngineUnavailable):
        return all(replica.status() for _, replica in pool.servers.values())
    return False


@pytest.fixture(autouse=True)
def short_poll_interval(monkeypatch) -> None:
    monkeypatch.setattr(sdc_check, "POLL_INTERVAL_S", 0.01)


async def test_one_of_so_many_answers_is_computed_again_by_the_other_engine_and_has_the_same_bits(folder):
    async with serving(folder) as served:
        for params in ({"temperature": 0}, {"temperature": 1.0}, {"logprobs": 2}) * 2:
            await served.ask(**params)
            await until(lambda: sum(served.checks.values()) == served._number // EVERY, 30)
        assert served.checks == {"equal": 2, "different": 0}
        again = [(name, request) for name, request in served.pool.answers if request.when_idle]
        assert len(again) == 2 and again[0][1].params.seed is not None
        firsts = served.pool.answers[2][0], served.pool.answers[6][0]
        assert all(first != name for first, (name, _) in zip(firsts, again, strict=True))


@pytest.mark.parametrize("bit", [2, 14])  # of the first channel's weight: a small error, and a large one
async def test_one_wrong_bit_in_the_weights_of_one_engine_is_found_within_so_many_answers(folder, caplog, bit):
    async with serving(folder) as served:
        model = served.pool.servers["two"][0]._core.ranks.runner.model
        weight = next(w for name, w in model.named_parameters() if name.endswith("layernorm.weight"))
        weight.data.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        for _ in range(EVERY):
            assert not served.checks["different"]
            await served.ask(temperature=0)
        await until(lambda: sum(served.checks.values()) == 1, 30)
        assert served.checks == {"equal": 0, "different": 1}
        (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "engine=one" in line.getMessage() and "other_logprob=-" in line.getMessage()
        shown = block("docs/sdc_check.md", "", with_="answers differ")
        assert re.findall(r"(\w+)=", line.getMessage()) == re.findall(r"(\w+)=", shown)


async def test_where_bits_depend_on_the_batch_only_errors_above_rounding_are_found(folder, caplog):
    """The other engine computes the given tokens: a small error in its weights is within the tolerance, a large one is
    not."""
    async with serving(folder, exact=False) as served:
        model = served.pool.servers["two"][0]._core.ranks.runner.model
        weight = next(w for name, w in model.named_parameters() if name.endswith("layernorm.weight"))
        for factor, found in ((1.001, {"equal": 1, "different": 0}), (1e4, {"equal": 1, "different": 1})):
            weight.data *= factor
            for _ in range(EVERY):
                await served.ask(temperature=0, max_tokens=MANY + 1)
            await until(lambda: sum(served.checks.values()) == sum(found.values()), 30)  # noqa: B023
            assert served.checks == found
        (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "engine=one" in line.getMessage()


def answer(*entries: tuple[float, int]) -> SampledAnswer:
    """entries: log-probability and rank of each token."""
    found = SampledAnswer(GenerateRequest(request_id="r", prompt=[1, 2]))
    found.tokens, found.ranks = [(7, logprob) for logprob, _ in entries], [rank for _, rank in entries]
    return found


def given(*entries: tuple[float, float]) -> SampledAnswer:
    """entries: log-probability of each token but the last, and of the most likely one there."""
    found = answer()
    found.prompt_logprobs = [None, None, *(TokenLogprob(7, own, 2, [(8, best)]) for own, best in entries)]
    return found


@pytest.mark.parametrize(
    ("first", "again", "position"),
    [
        ([(-1.0, 1), (-2.0, 1)], [(-1.2, -1.2)], None),
        ([(-1.0, 1), (-2.0, 1)], [(-2.1, -2.1)], 0),  # its log-probability has changed
        ([(-1.0, 1), (-2.0, 1)], [(-1.5, -0.4)], 0),  # it was the most likely token, and is by far not
        ([(-1.0, 2), (-2.0, 1)], [(-1.5, -0.4)], None),  # it was drawn at random
        ([(-1.0, 2)] * 9, [(-1.09, -1.0)] * 8, None),
        ([(-1.0, 2)] * 9, [(-1.2, -1.0)] * 7 + [(-1.3, -1.0)], 7),  # all are a little off
        ([(-1.0, 2)] * 4, [(-1.2, -1.0)] * 3, None),  # too few to tell
        ([(-1.0, 1)], [], None),
    ],
)
def test_differences_count_above_a_tolerance(first, again, position):
    found = far_difference(answer(*first), given(*again))
    assert (found and found[0]) == position


async def test_a_check_gives_way_to_a_request_and_is_made_later(folder):
    async with serving(folder, ("alone",)) as served:
        for _ in range(EVERY - 1):
            await served.ask()
        await served.ask(max_tokens=30)
        server = served.pool.servers["alone"][0]
        await until(lambda: server._core.scheduler.queue.running, 30)  # the check has begun
        await served.ask()
        assert not sum(served.checks.values()) and server._core.scheduler.totals.finished["abort"] == 1
        await until(lambda: served.checks["equal"], 30)
