"""What a decode replica makes sure of before it takes requests: that there are prefill engines that fit it, and that a
prompt computed there goes on here as if it had been computed here. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from deployments.frontend.token_channel import TokenChannel
from deployments.replicas.engine_replica import EngineReplica
from deployments.replicas.prefill_dispatcher import PrefillPool
from engine.errors import EngineUnavailable, StartupError
from engine.wire.messages import EngineStatus, GenerateRequest, TokenLogprob
from engine.wire.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
TEST_TOKENS = 4  # the first is sampled by prefill, all others need the KV
TEST_TIMEOUT_S = 60.0
TRIES = 3
GRACE_S = 5.0  # the engine ends a late request itself
TEST_BLOCKS = 2.5  # whole ones and a part of one
TOLERANCE = 0.5  # nats. Equal prompts differ by rounding, a few hundredths in bfloat16; wrong KV by several


async def pair(engine: EngineReplica, pool: PrefillPool, host: str, timeout_s: float, max_model_len: int) -> None:
    """Wait for a prefill engine that fits, and try it.

    With the prefill pool down, which was up once, or scaled to zero, the replica goes on without: it is needed all the
    more then.
    timeout_s: to wait for one. max_model_len: of this engine. Raises StartupError, which names both and the reason.
    """
    try:
        async with asyncio.timeout(timeout_s):
            partner = await _find(engine, pool)
    except TimeoutError:
        raise StartupError(f"no prefill replica came up within startup_timeout_s={timeout_s:.0f}") from None
    if partner is None:
        logger.warning("no prefill replica is up: prompts are computed here until one is")
    else:
        await _try(engine, partner, host, max_model_len)


async def _find(engine: EngineReplica, pool: PrefillPool) -> EngineStatus | None:
    while True:
        state = await pool.state()  # asked first: what has come by the time it is not deploying is all there is
        try:
            own = engine.status()
        except EngineUnavailable:  # it has just started
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        found = await pool.statuses()
        fitting = [status for status in found if status.fingerprint == own.fingerprint]
        if fitting:
            return fitting[0]
        if found and state != "deploying":
            raise StartupError(mismatch(own, found[0]))
        if not found and state == "down":
            return None
        await asyncio.sleep(POLL_INTERVAL_S)


def mismatch(decode: EngineStatus, prefill: EngineStatus) -> str:
    """Of the fingerprints, which are lists of `name=value`, what differs."""
    theirs, ours = prefill.fingerprint.split(), decode.fingerprint.split()
    has = ", ".join(part for part in theirs if part not in ours) or "less"
    needs = ", ".join(part for part in ours if part not in theirs) or "nothing"
    return f"{prefill.engine_id} cannot compute prompts for {decode.engine_id}: it has {has}, where {needs} is needed"


async def _try(engine: EngineReplica, partner: EngineStatus, host: str, max_model_len: int) -> None:
    """The same prompt, computed there and here: the answers must be the same. Raises StartupError."""
    own = engine.status()
    channel = TokenChannel(host)
    receiving = asyncio.create_task(channel.run())
    test = _Test(engine, channel, own, min(int(TEST_BLOCKS * own.stats.block_size), max_model_len - TEST_TOKENS))
    try:
        remote = await test.remote(partner.engine_id)
        local = await test.answer("local")
    finally:
        receiving.cancel()
    if problem := difference(remote, local):
        raise StartupError(f"a test prompt computed by {partner.engine_id} for {own.engine_id} is wrong: {problem}")
    logger.info("test prompt went from %s to %s", partner.engine_id, own.engine_id)


@dataclass(frozen=True, slots=True)
class _Test:
    """prompt_tokens: of the test prompt."""

    engine: EngineReplica
    channel: TokenChannel
    own: EngineStatus
    prompt_tokens: int

    async def remote(self, partner: str) -> list[TokenLogprob]:
        """A busy pool may be too late once. Raises StartupError."""
        for number in range(1, TRIES + 1):
            try:
                return await self.answer("remote", number)
            except EngineUnavailable as error:
                reason = f"a test prompt did not get from {partner} to {self.own.engine_id}: {error}"
                logger.warning("%s (try %d of %d)", reason, number, TRIES)
        raise StartupError(reason)

    async def answer(self, prefill: Literal["local", "remote"], number: int = 1) -> list[TokenLogprob]:
        """Raises EngineUnavailable if there is none."""
        request_id = f"self-test-{prefill}-{number}-{self.own.engine_id}"
        request = GenerateRequest(
            request_id=request_id,
            prompt=[1 + i % 64 for i in range(self.prompt_tokens)],
            params=SamplingParams(temperature=0.0, max_tokens=TEST_TOKENS, ignore_eos=True, logprobs=0),
            reply_to=self.channel.address,
            timeout_s=TEST_TIMEOUT_S,
            cache_salt=request_id,  # so that nobody's cache spares the work
            prefill=prefill,
        )
        inbox = self.channel.open([request_id])

        def wake(call: asyncio.Task[None]) -> None:  # if it failed: then no delta comes
            if not call.cancelled() and call.exception() is not None:
                inbox.put_nowait(None)

        call = asyncio.create_task(self.engine.generate(request))
        call.add_done_callback(wake)
        logprobs: list[TokenLogprob] = []
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S + GRACE_S):
                while (delta := await inbox.get()) is not None:
                    if delta.error is not None:
                        raise EngineUnavailable(delta.error.message)
                    logprobs += delta.logprobs or []
                    if delta.finish_reason is not None:
                        return logprobs
            raise EngineUnavailable(str(call.exception()))
        except TimeoutError:
            raise EngineUnavailable(f"no answer within {TEST_TIMEOUT_S:.0f} s") from None
        finally:
            call.cancel()
            self.channel.close([request_id])


def difference(remote: list[TokenLogprob], local: list[TokenLogprob]) -> str | None:
    """What differs by more than rounding. After the first token that differs, which it may where two are about equally
    likely, there is nothing to compare."""
    same = len(list(takewhile(lambda pair: pair[0].token_id == pair[1].token_id, zip(remote, local, strict=True))))
    for i, (there, here) in enumerate(zip(remote[: same + 1], local[: same + 1], strict=True)):
        if abs(there.logprob - here.logprob) > TOLERANCE:
            return f"token {i} has logprob {there.logprob:.2f}, computed here it has {here.logprob:.2f}"
    return None
