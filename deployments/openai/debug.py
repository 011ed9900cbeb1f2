"""The answer of /debug/requests/{id}: what happened to one request, as its ingress and all its engines tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from deployments.observability.telemetry import Telemetry
from deployments.observability.timeline import RequestTimeline, SequenceTimeline, TimelineEvent
from deployments.replicas.engine_pool import EnginePool
from engine.errors import RequestNotFound
from engine.wire.messages import EngineRequestLog


async def request_stories(name: str, telemetry: Telemetry, pools: Mapping[str, EnginePool]) -> RequestTimeline:
    """name: see SequenceTimeline.is_of. pools: by model name. An engine that is gone, or does not answer in time, tells
    nothing; nor does one that has had many requests since.

    Raises RequestNotFound if no ingress knows the request.
    """
    stories = await telemetry.all_stories(name)
    if not stories:
        raise RequestNotFound(name)
    attempts: dict[str, list[str]] = {}  # by model
    for story in stories:
        attempts.setdefault(story.model, []).extend(story.attempts)
    asked = [pools[model].journals(names) for model, names in attempts.items() if model in pools]
    journals = [journal for pool in await asyncio.gather(*asked) for journal in pool]
    return RequestTimeline(name, [_with_journals(story, journals) for story in stories])


def _with_journals(story: SequenceTimeline, journals: list[EngineRequestLog]) -> SequenceTimeline:
    """A copy, with what the engines know."""
    told = [
        TimelineEvent(at, journal.engine_id, line)
        for journal in journals
        for attempt in story.attempts
        for at, line in journal.lines.get(attempt, ())
    ]
    moments = sorted([*story.moments, *told], key=lambda moment: moment.at)
    return msgspec.structs.replace(story, moments=moments)
