"""Lets a new replica fetch the prefixes that its peers use most, before it takes requests. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import zmq.asyncio

from deployments.replicas.encoded_request import EncodedRequest
from deployments.replicas.engine_control import EngineControl
from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket
from engine.errors import EngineUnavailable, ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.kv_fetching import HotPrefix, HotPrefixes, KVHolder
from engine.wire.remote_request import Peer
from engine.wire.sampling_params import SamplingParams
from engine.wire.stats.engine_stats import EngineStats
from engine.wire.token_delta import TokenBatch

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
MAX_PREFIXES = 16
MAX_CACHE_SHARE = 2  # prefixes fill at most the engine's KV blocks divided by this number

AskPeers = Callable[[], Awaitable[Sequence[HotPrefixes]]]


async def warm_start(
    engine: EngineControl, ask: AskPeers, *, timeout_s: float, max_bytes: int, host: str, key: ClusterKey | None
) -> None:
    """Fetch the KV of prefixes until all chosen ones are there, or for `timeout_s`.

    Each prefix becomes an ordinary request for one token, which names the peer as the engine that has it cached. So the
    engine computes what a peer has lost, or what is faster to compute than to fetch. ask: function that returns the
    prefixes of all other replicas. max_bytes: limit on the KV of all prefixes. host: address at which the engine
    reaches this machine. key: cluster key. A peer that fails costs nothing but time.
    """
    began, chosen, done = time.monotonic(), [], 0
    context = zmq.asyncio.Context()
    tokens: PullSocket[TokenBatch] = PullSocket(context, host, TokenBatch, name="warm_start", key=key)
    receiving = asyncio.create_task(tokens.serve(lambda batch: None))  # the text is of no interest
    try:
        async with asyncio.timeout(timeout_s):
            stats = await _stats(engine)
            max_tokens = stats.blocks_total * stats.block_size // MAX_CACHE_SHARE
            chosen = choose(await ask(), max_bytes, max_tokens)
            for prefix, peer in chosen:
                with suppress(ServingError):
                    await engine.run_request(EncodedRequest.of(_request(prefix, peer, tokens.address)))
                    done += 1
    except TimeoutError:
        pass  # the replica takes requests with what it has
    except Exception as error:  # noqa: BLE001 - of Serve or Ray; a replica needs no warm start
        logger.warning("the other replicas cannot be asked for prefixes: %r", error)
    finally:
        receiving.cancel()
        context.destroy(linger=0)
    logger.info("warm start prefixes=%d of=%d seconds=%.1f", done, len(chosen), time.monotonic() - began)


async def _stats(engine: EngineControl) -> EngineStats:
    """Return the statistics of an engine, once it has reported."""
    while True:
        with suppress(EngineUnavailable):
            return engine.status().stats
        await asyncio.sleep(POLL_INTERVAL_S)


def choose(found: Sequence[HotPrefixes], max_bytes: int, max_tokens: int) -> list[tuple[HotPrefix, Peer]]:
    """Return the most used prefixes that fit into both bounds together, each with an engine that has it. Tokens that
    two prefixes share count once."""
    uses: dict[tuple[str, tuple[int, ...]], int] = {}
    holders: dict[tuple[str, tuple[int, ...]], tuple[HotPrefix, Peer]] = {}
    for of_peer in found:
        for prefix in of_peer.prefixes:
            name = (prefix.cache_salt, tuple(prefix.token_ids))
            uses[name] = uses.get(name, 0) + prefix.uses
            holders[name] = (prefix, of_peer.peer)
    chosen: list[tuple[HotPrefix, Peer]] = []
    num_bytes = num_tokens = 0
    for name in sorted(uses, key=lambda name: -uses[name])[:MAX_PREFIXES]:
        prefix, peer = holders[name]
        shared = max((_common(prefix, other) for other, _ in chosen), default=0)
        new = len(prefix.token_ids) - shared
        new_bytes = prefix.num_bytes * new // len(prefix.token_ids)
        if num_bytes + new_bytes <= max_bytes and num_tokens + new <= max_tokens:
            chosen.append((prefix, peer))
            num_bytes, num_tokens = num_bytes + new_bytes, num_tokens + new
    return chosen


def _common(one: HotPrefix, other: HotPrefix) -> int:
    """Return how many tokens at the beginning of two prefixes are equal."""
    if one.cache_salt != other.cache_salt:
        return 0
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(other.token_ids)))


def _request(prefix: HotPrefix, peer: Peer, reply_to: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"warm-start-{secrets.token_hex(8)}",
        prompt=prefix.token_ids,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        cache_salt=prefix.cache_salt,
        prefill="local",
        reply_to=reply_to,
    ).asking(KVHolder(peer, len(prefix.token_ids)))
