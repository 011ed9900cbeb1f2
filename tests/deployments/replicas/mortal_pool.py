"""Engines that die on cue, and what a client gets of them through a Generation."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from deployments.frontend.admission import Admission, AdmissionLimits
from deployments.frontend.availability import Availability
from deployments.frontend.generation import LiveGeneration
from deployments.frontend.sequence import RequestUsage
from deployments.frontend.sequence_context import SequenceContext
from deployments.frontend.token_channel import TokenChannel
from deployments.observability.stats import IngressStats, ModelStats
from deployments.observability.timeline import RequestTimelines
from deployments.poison.poison import Poison
from deployments.poison.sequence_trial import SequenceTrial
from deployments.replicas.pools import EnginePool, ReplicaStatus
from engine.core.request import Request
from engine.errors import EngineUnavailable, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.stats.handoff_stats import PeerPool
from engine.wire.token_delta import ErrorInfo, TokenBatch, TokenDelta, TokenLogprob
from tests.deployments.fake_api import MAX_MODEL_LEN, tokenizer
from tests.fake_engine import EOS

WORDS = tokenizer().encode("The quick 👩‍🚀 héhé: a\n")  # most characters outside ASCII are several tokens
LIMITS = AdmissionLimits(max_num_seqs=64, num_engines=1, num_ingresses=1, max_waiting=64, max_waiting_tokens=10_000)


@dataclass(frozen=True, slots=True)
class Death:
    """after: tokens that reach the ingress before. error: what the call raises; or what the last delta says, if
    `reported`; with neither, the call returns as if all tokens had come. skipped: only one token is lost, and the next
    one comes."""

    after: int = 0
    error: ServingError | None = field(default_factory=lambda: EngineUnavailable("rank 0 died"))
    reported: bool = False
    skipped: bool = False


class MortalPool:
    """Engines of a model whose next token depends on all tokens before it, and on the seed.

    deaths: of each sequence, by its first request id, one per attempt. A dead engine comes back to life when the next
    attempt begins, and then says what nobody asked it for: `late` counts how much.
    heard: what has reached the client, by the same ids. requests: as they came.
    """

    def __init__(self, reply_to: str, deaths: dict[str, list[Death]]):
        self.requests: list[GenerateRequest] = []
        self.heard: dict[str, Heard] = {}
        self.late = 0
        self._deaths = {name: list(of) for name, of in deaths.items()}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
        self._socket.connect(reply_to)

    async def generate(self, request: GenerateRequest, avoid: Sequence[str] = ()) -> None:
        self.requests.append(request)
        name, _, attempt = request.request_id.partition(".")
        if attempt:
            before = name if attempt == "1" else f"{name}.{int(attempt) - 1}"
            await self._send(TokenDelta(request_id=before, token_ids=WORDS[:3]))
            await self._send(TokenDelta(request_id=before, token_ids=[EOS], finish_reason="stop"))
            self.late += 2
        death = self._deaths[name].pop(0) if self._deaths.get(name) else None
        given = len(request.prompt) - (request.num_prompt or len(request.prompt))
        for number, delta in enumerate(answer(request), start=given):
            if death is not None and number == death.after:
                await self._until_heard(name, number)
                if death.skipped:
                    await self._send(answer(request)[number - given + 1])
                    await asyncio.Event().wait()  # until it is cancelled
                if death.reported and death.error is not None:
                    info = ErrorInfo.of(death.error)
                    await self._send(TokenDelta(request_id=request.request_id, finish_reason="error", error=info))
                    await asyncio.Event().wait()  # until it is cancelled: the call's end comes after the delta
                elif death.error is not None:
                    raise death.error
                return
            await self._send(delta)
        await self._until_heard(name, given + len(answer(request)))

    async def statuses(self) -> list[ReplicaStatus]:
        raise EngineUnavailable("nobody is asked")

    async def asleep(self) -> bool:
        return False

    async def peer_statuses(self) -> dict[PeerPool, list[ReplicaStatus]]:
        return {}

    def close(self) -> None:
        self._socket.close(linger=0)

    async def _until_heard(self, name: str, tokens: int) -> None:
        """Or until a stop string has come before."""
        while (heard := self.heard.get(name, Heard())).finish_reason is None and len(heard.token_ids) < tokens:
            await asyncio.sleep(0)  # they are on their way

    async def _send(self, delta: TokenDelta) -> None:
        batch = TokenBatch(engine_id="mortal", commands_to="tcp://127.0.0.1:9", step=0, deltas=[delta])
        await self._socket.send(msgspec.msgpack.encode(batch))


def answer(message: GenerateRequest) -> list[TokenDelta]:
    """What an engine says to a request, with a Request's own idea of seed, output and limits."""
    request = Request.create(message, MAX_MODEL_LEN, 0.0)
    deltas: list[TokenDelta] = []
    while True:
        token = next_token(request)
        request.tokens.append(token)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [TokenLogprob(token, -len(request.tokens) / 8, 1, [])]
        prompt = None
        if request.params.prompt_logprobs is not None and not deltas:
            prompt = [None, *(TokenLogprob(t, -1.0, 2, []) for t in request.tokens[1 : request.num_prompt])]
        reason: Literal["stop", "length"] | None = None
        if token == EOS:
            reason = "stop"
        elif request.num_output == request.max_tokens:
            reason = "length"
        delta = TokenDelta(
            request_id=request.request_id,
            position=request.num_output - 1,
            token_ids=[token],
            logprobs=logprobs,
            prompt_logprobs=prompt,
            num_cached_tokens=0 if deltas else len(message.prompt) - 1,
            finish_reason=reason,
        )
        deltas.append(delta)
        if reason is not None:
            return deltas


def next_token(request: Request) -> int:
    state = hashlib.blake2b(repr((request.seed, request.tokens)).encode()).digest()
    if state[0] < 16 and request.num_output >= request.params.min_tokens:
        return EOS
    return WORDS[state[1] % len(WORDS)]


@dataclass(slots=True)
class Heard:
    """What the client got of one sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob | None]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Ingress:
    """One HTTP request's worth of an ingress."""

    channel: TokenChannel
    ingress_stats: IngressStats
    stats: ModelStats = field(default_factory=ModelStats)
    timelines: RequestTimelines = field(default_factory=lambda: RequestTimelines("ingress-1"))
    poison: Poison = field(default_factory=Poison)

    def generation(
        self, requests: Sequence[GenerateRequest], pool: EnginePool, *, n: int = 1, max_replays: int = 3
    ) -> LiveGeneration:
        """n: sequences per prompt."""
        frontend = SequenceContext(
            model="mortal",
            tokenizer=tokenizer(),
            channel=self.channel,
            pool=pool,
            admission=Admission(pool, LIMITS, self.stats, Availability("mortal")),
            stats=self.stats,
            timelines=self.timelines,
            max_replays=max_replays,
            observers=(partial(SequenceTrial, self.poison),),
        )
        sent = [msgspec.structs.replace(request, reply_to=self.channel.address) for request in requests]
        return LiveGeneration(frontend, [sent[i : i + n] for i in range(0, len(sent), n)], "test")


@asynccontextmanager
async def ingress() -> AsyncGenerator[Ingress]:
    stats = IngressStats("ingress-1")
    channel = TokenChannel("127.0.0.1", stats)
    task = asyncio.create_task(channel.run())
    await asyncio.sleep(0)  # only what has begun closes its socket when it is cancelled
    try:
        yield Ingress(channel, stats)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(slots=True)
class Outcome:
    heard: list[Heard]
    usage: RequestUsage


async def listen(generation: LiveGeneration, requests: Sequence[GenerateRequest], so_far: dict[str, Heard]) -> Outcome:
    """All that comes; `so_far` shows it while it does, by request id."""
    heard = [Heard() for _ in requests]
    so_far.update({request.request_id: one for request, one in zip(requests, heard, strict=True)})
    async for chunk in generation.chunks():
        one = heard[chunk.index]
        one.text += chunk.text
        one.token_ids += chunk.token_ids
        one.offsets += chunk.offsets
        one.logprobs += chunk.logprobs or []
        if chunk.prompt_logprobs is not None:
            one.prompt_logprobs.append(chunk.prompt_logprobs)
        assert one.finish_reason is None, "text after the end"
        one.finish_reason, one.stop_reason = chunk.finish_reason, chunk.stop_reason
    return Outcome(heard, generation.usage)
