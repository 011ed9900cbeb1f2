"""Timelines of the newest sequences of one ingress, for GET /debug/requests and `manta explain`."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from itertools import chain, islice
from typing import Literal

import msgspec

from engine.wire.parts.costs import SequenceCost
from engine.wire.timeline import TimelineEvent

MAX_ENDED = 1000
MAX_EVENTS = 200  # per timeline: engines and routers may report events again and again
MAX_TEXT_TOKENS = 1000  # kept of a prompt, and of an output

State = Literal["waiting", "running", "ended"]

_KIND = re.compile(r"^[a-z]+[-_]")  # the beginning of an answer's id, before the client's own: cmpl-, msg_


class SequenceTimeline(msgspec.Struct, kw_only=True):
    """One sequence as its ingress has seen it so far. Contains its texts only if the operator enables that."""

    request_id: str  #: id of its first attempt in an engine; later ones add `.1`, `.2`
    model: str
    key: str = ""  #: name of its API key; empty on a server without keys
    adapter: str | None = None  #: name of the LoRA adapter that computes it
    prompt_tokens: int
    arrived_at: float  #: seconds since 1970
    state: State = "waiting"  #: `waiting` for admission or for its first token, `running` since then
    reason: str | None = None  #: reason of its end as its client saw it: stop, length, abort, error, or refused
    error: str | None = None  #: the error sent to the client
    error_type: str | None = None  #: its code, such as `overloaded`
    cached_tokens: int = 0  #: tokens of the prompt that were cached
    output_tokens: int = 0
    preemptions: int = 0
    replays: int = 0
    engines: list[str] = []  #: engines that sent tokens, oldest first
    admission_s: float | None = None  #: seconds waited in the ingress
    queue_s: float | None = None  #: seconds waited in its first engine until it was scheduled
    prefill_s: float | None = None  #: from then to the first token
    first_token_s: float | None = None  #: from the HTTP request to the first token
    seconds: float | None = None  #: from the HTTP request to the end
    costs: dict[str, SequenceCost] = {}  #: what each attempt has cost, by its request id
    price: float = 0.0  #: money for all of that, once it has ended; 0 without prices
    events: list[TimelineEvent] = []  #: in order of arrival; in the result of `RequestTimelines.of`, oldest first
    prompt: str | None = None  #: its first MAX_TEXT_TOKENS, set at its end if RequestTimelines.keeps_texts
    output: str | None = None  #: first MAX_TEXT_TOKENS of its output, likewise

    @property
    def attempts(self) -> list[str]:
        return [self.request_id, *(f"{self.request_id}.{n}" for n in range(1, self.replays + 1))]

    @property
    def answer_id(self) -> str:
        """`id` of the answer to which it belongs."""
        return self.request_id.rsplit("-", 2)[0]

    def is_of(self, name: str) -> bool:
        """Return whether `name` identifies the sequence: as an answer's `id`, an X-Request-Id, or a sequence id from a
        log line."""
        return name in (self.answer_id, _KIND.sub("", self.answer_id), *self.attempts)


class RequestTimeline(msgspec.Struct):
    """Everything known about one request."""

    id: str
    sequences: list[SequenceTimeline]
    """Its sequences, oldest first: `n` for each of its prompts, and more if clients reused its id."""


class IngressOverview(msgspec.Struct, frozen=True):
    """The state of an ingress, for the console."""

    ingress_id: str
    waiting: dict[str, int]
    """Number of sequences waiting for admission, by model."""
    requests: list[SequenceTimeline]
    """See `RequestTimelines.newest`."""


class RequestTimelines:
    """Timelines of all live sequences, and of the MAX_ENDED newest ended ones."""

    def __init__(self, ingress_id: str, *, keeps_texts: bool = False):
        self.ingress_id, self.keeps_texts = ingress_id, keeps_texts
        self.begun = asyncio.Event()
        """Set when a sequence begins; the waiting task clears it."""
        self._live: dict[str, SequenceTimeline] = {}
        self._ended: deque[SequenceTimeline] = deque(maxlen=MAX_ENDED)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def begin(self, timeline: SequenceTimeline) -> None:
        self._live[timeline.request_id] = timeline
        self.begun.set()

    def end(self, timeline: SequenceTimeline, *, keep: bool = True) -> None:
        if self._live.pop(timeline.request_id, None) is not None and keep:
            self._ended.append(timeline)

    def note(self, attempt: str, what: str) -> None:
        """Add an event to a live sequence, from any thread. Consecutive repetitions count once.

        attempt: request id of its current attempt.
        """
        timeline = self._live.get(attempt) or self._live.get(attempt.rpartition(".")[0])
        if timeline is not None and timeline.events[-1].what != what and len(timeline.events) < MAX_EVENTS:
            timeline.events.append(TimelineEvent.now(what, self.ingress_id))

    def newest(self, count: int) -> list[SequenceTimeline]:
        """Return live sequences, then ended ones, each newest first, without events and texts."""
        newest = islice(chain(reversed(self._live.values()), reversed(self._ended)), count)
        return [msgspec.structs.replace(t, events=[], prompt=None, output=None) for t in newest]

    def of(self, name: str) -> list[SequenceTimeline]:
        """Return the timelines that `name` identifies (SequenceTimeline.is_of)."""
        found = [timeline for timeline in (*self._ended, *self._live.values()) if timeline.is_of(name)]
        return [msgspec.structs.replace(t, events=sorted(t.events, key=lambda event: event.at)) for t in found]
