"""What happened to the newest sequences of one ingress, for GET /debug/requests and `manta explain`."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from engine.wire.timeline import TimelineEvent

MAX_ENDED = 1000
MAX_EVENTS = 200  # of one timeline, from where one that finds no room might be told of again and again

State = Literal["waiting", "running", "ended"]


class SequenceTimeline(msgspec.Struct, kw_only=True):
    """One sequence as its ingress has seen it so far. Never its text, nor its tokens.

    request_id: of its first attempt in an engine; later ones have `.1`, `.2` behind it.
    state: `waiting` for admission or for its first token; `running` since then.
    reason: how it ended for its client: stop, length, abort, error, or refused. error: what the client was told.
    cached_tokens: of the prompt. engines: whose tokens came, oldest first.
    admission_s: that it waited in the ingress. queue_s, prefill_s: in its first engine, until it was scheduled, and
        from then to the first token. first_token_s, seconds: from the HTTP request to the first token, and to the end.
    events: in the order in which the ingress heard of them; of `RequestTimelines.of`, oldest first.
    """

    request_id: str
    model: str
    prompt_tokens: int
    arrived_at: float
    state: State = "waiting"
    reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    replays: int = 0
    engines: list[str] = []
    admission_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    seconds: float | None = None
    events: list[TimelineEvent] = []

    @property
    def attempts(self) -> list[str]:
        """Their request ids."""
        return [self.request_id, *(f"{self.request_id}.{n}" for n in range(1, self.replays + 1))]

    def is_of(self, name: str) -> bool:
        """name: an answer's `id`, its X-Request-Id, or the id of a sequence as log lines have it."""
        answer_id = self.request_id.rsplit("-", 2)[0]
        return name in (answer_id, answer_id.partition("-")[2], *self.attempts)


class RequestTimeline(msgspec.Struct):
    """sequences: of the request, oldest first: `n` for each of its prompts, and more if clients used its id again."""

    id: str
    sequences: list[SequenceTimeline]


class RequestTimelines:
    """Those of all live sequences, and of the newest ones that have ended."""

    def __init__(self, ingress_id: str):
        self.ingress_id = ingress_id
        self._live: dict[str, SequenceTimeline] = {}
        self._ended: deque[SequenceTimeline] = deque(maxlen=MAX_ENDED)

    def begin(self, timeline: SequenceTimeline) -> None:
        self._live[timeline.request_id] = timeline

    def end(self, timeline: SequenceTimeline) -> None:
        if self._live.pop(timeline.request_id, None) is not None:
            self._ended.append(timeline)

    def note(self, attempt: str, what: str) -> None:
        """Of a live sequence; attempt: the id of its present attempt. From any thread; saying it twice in a row does no
        harm."""
        timeline = self._live.get(attempt) or self._live.get(attempt.rpartition(".")[0])
        if timeline is not None and timeline.events[-1].what != what and len(timeline.events) < MAX_EVENTS:
            timeline.events.append(TimelineEvent.now(what, self.ingress_id))

    def of(self, name: str) -> list[SequenceTimeline]:
        """See `SequenceTimeline.is_of`. Several, if a request had several sequences, or clients used an id twice."""
        found = [timeline for timeline in (*self._ended, *self._live.values()) if timeline.is_of(name)]
        return [msgspec.structs.replace(t, events=sorted(t.events, key=lambda event: event.at)) for t in found]
