"""Requests that stop here so that another engine continues them. Pure Python.

A move is a handoff whose prompt is computed already (kv_transfer/protocol/protocol.py). This engine does not send the
newest token to the client: it is sent with the KV, like the first token in any handoff. The next engine continues as
after any handoff. If it does not get the KV, it computes prompt and output again, with the same tokens.
"""

from __future__ import annotations

import logging

import msgspec

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, State
from engine.core.request_queue import RequestQueue
from engine.parts.handoffs.prompts_for_others import PromptsForOthers
from engine.wire.handoff import HeldBlocks
from engine.wire.token_delta import TokenDelta

logger = logging.getLogger(__name__)

ATTEMPTS = 2  # tokens after which a request may stop; after the first, a recurrent state may be one token too new


def choose(queue: RequestQueue, others: list[Request], count: int) -> list[Request]:
    """Return up to `count` requests that have no KV here, and so can leave at once. If fewer than `count` can, mark
    running requests, beginning with the newest, to stop after their next token.

    others: live requests that wait outside the queue. One that has blocks for KV on its way here does not leave before
    it runs.
    """
    waiting = [*reversed(queue.waiting), *others]
    at_once = [r for r in waiting if not (r.asked_by or r.tables or r.state is State.FINISHED)][:count]
    running = [r for r in reversed(queue.running) if r.generates and not (r.leaving or r.asked_by)]
    for request in running[: count - len(at_once)]:
        request.leaving = ATTEMPTS
    return at_once


def stop(request: Request, delta: TokenDelta, kv_cache: KVCacheManager, held: PromptsForOthers) -> TokenDelta | None:
    """Stop a marked request after a step. Returns its last delta from this engine, or None if it has to continue here
    for now.

    delta: tokens of the step. The returned delta has no source if the KV cannot be handed over.
    """
    one_token = len(delta.token_ids) == 1 and request.computed == len(request.tokens) - 1
    if not one_token or request.num_output < 2 or request.state is not State.RUNNING:
        return None  # a sequence's first token brings the client what is known of the prompt
    token, logprob = request.tokens.pop(), delta.logprobs[0] if delta.logprobs else None
    request.leaving -= 1
    if blocks := blocks_to_continue(kv_cache, request):
        source = held.hold(request, blocks, token, logprob, kv_cache.pool.block_size)
    elif request.leaving:
        request.tokens.append(token)
        return None
    else:
        source = None
    how = "its KV is held" if source else "without its KV"
    request.note(f"stopped after {request.num_output} output tokens, to continue in another engine: {how}")
    logger.info("request moves request_id=%s output_tokens=%d held=%s",
                request.request_id, request.num_output, source is not None)  # fmt: skip
    last = msgspec.structs.replace(
        delta, token_ids=[], logprobs=None, timeline=[*delta.timeline, *request.take_timeline()]
    )
    return last.telling(source) if source else last


def blocks_to_continue(kv_cache: KVCacheManager, request: Request) -> list[HeldBlocks]:
    """Return the blocks that another engine needs to continue after the known tokens, all of which must be computed:
    one entry for each KV cache group. Empty if no engine could continue from these blocks."""
    held = [group.to_continue(request) for group in kv_cache.groups]
    return [] if None in held else [HeldBlocks(*blocks) for blocks in held if blocks is not None]
