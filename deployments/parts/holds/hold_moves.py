"""Lets other replicas hold the prompts that a replica which is about to stop holds for clients. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import msgspec
import zmq.asyncio

from deployments.replicas.departure import Statuses, takers
from deployments.replicas.engine_control import EngineControl
from deployments.replicas.replica_part import OtherReplicas
from engine.distributed.sockets import PullSocket
from engine.errors import EngineUnavailable
from engine.wire.generate_request import GenerateRequest, ModelIdentity
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.holds import GiveHolds, HeldPrompt, HeldPrompts, HoldMark, PromptHold
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch

logger = logging.getLogger(__name__)

GROUP = 4  # holds that move at the same time
ASK_TIMEOUT_S = 2.0  # for the engine to list its holds
MOVE_S = 10.0  # for one group to move
POLL_INTERVAL_S = 0.01


async def move_holds(engine: EngineControl, others: OtherReplicas) -> None:
    """Ask other replicas to hold the prompts that an engine holds, until all have been asked for or one group fails.

    Each hold becomes an ordinary request for one token, which asks for the hold with its remaining time, and names the
    engine from which its KV can be fetched. So the other engine computes what it cannot fetch, and refuses what it has
    no room for.
    """
    began, asked, answered, granted = time.monotonic(), 0, 0, 0
    avoid = await _unfit(engine, others.statuses)
    if avoid is None:
        return

    def receive(batch: TokenBatch) -> None:
        nonlocal answered, granted
        answered += sum(delta.finish_reason is not None for delta in batch.deltas)
        granted += sum(outcome.refusal is None for delta in batch.deltas for outcome in delta.records(HoldOutcome))

    context = zmq.asyncio.Context()
    tokens: PullSocket[TokenBatch] = PullSocket(context, others.host, TokenBatch, name="hold_moves", key=others.key)
    receiving = asyncio.create_task(tokens.serve(receive))
    try:
        while prompts := (given := await _given(engine)).prompts:
            asked += len(prompts)
            requests = [request_of(prompt, given.peer, others.model, tokens.address) for prompt in prompts]
            async with asyncio.timeout(MOVE_S):
                await asyncio.gather(*(others.send(request, avoid=avoid) for request in requests))
                while answered < asked:  # a request can end before its tokens have arrived here
                    await asyncio.sleep(POLL_INTERVAL_S)
    except Exception as error:  # noqa: BLE001 - of Serve or Ray, or a ServingError; requests still have to leave
        logger.warning("a hold could not move: %r", error)
    finally:
        receiving.cancel()
        context.destroy(linger=0)
    if asked:
        logger.info("holds have moved granted=%d of=%d seconds=%.1f", granted, asked, time.monotonic() - began)


async def _given(engine: EngineControl) -> HeldPrompts:
    return msgspec.msgpack.decode(await engine.ask(GiveHolds(GROUP), ASK_TIMEOUT_S), type=HeldPrompts)


async def _unfit(engine: EngineControl, statuses: Statuses) -> list[str] | None:
    """Return the ids of the engines that cannot take holds of an engine, itself included; None if all cannot."""
    try:
        own, found = engine.status(), await statuses()
    except EngineUnavailable:
        return None
    except Exception as error:  # noqa: BLE001 - of Serve or Ray
        logger.warning("the other replicas cannot be asked: %r", error)
        return None
    fit = {other.engine_id for other in takers(own, found)}
    return [own.engine_id, *(other.engine_id for other in found if other.engine_id not in fit)] if fit else None


def request_of(prompt: HeldPrompt, peer: Peer | None, model: ModelIdentity, reply_to: str) -> GenerateRequest:
    num_tokens = len(prompt.token_ids)
    mark = HoldMark(num_tokens, prompt.ttl_s, max(0.0, prompt.left_s))
    return GenerateRequest(
        request_id=f"hold-{secrets.token_hex(8)}",
        prompt=prompt.token_ids,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        client=prompt.client,
        cache_salt=prompt.cache_salt,
        model=model,
        reply_to=reply_to,
    ).asking(
        prompt.adapter,
        PromptHold(marks=[mark], response_id=prompt.response_id, name=prompt.name),
        None if peer is None else KVHolder(peer, num_tokens),
    )
