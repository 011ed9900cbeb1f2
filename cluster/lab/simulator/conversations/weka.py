"""Reads Weka's traces of coding agents, which AgentX replays: one JSON object for each conversation, in a file of its
own, on a line, or in a folder of such files.

The fields are those of `WekaTrace` in ai-dynamo/aiperf, src/aiperf/dataset/loader/weka_trace_models.py, and of
callanjfox/kv-cache-tester, trace_replay_tester.md: `block_size`, and `requests` of the types `n` and `s` (calls:
`t` in s, `in`, `out`, `hash_ids`, `api_time`, `think_time`) and `subagent` (`t`, and `requests` of its own). Times of a
subagent's calls count from its own `t` if the first of them is smaller, as in AIPerf. Models and tool sizes are not
read.

A call waits for the calls that had ended when it came, and for which no other waited before: so calls in parallel stay
in parallel, and an agent waits for its subagents. It comes `think_time` after them, or, if that is missing, after the
recorded pause. Without `api_time` a call seems to end at once, so that pauses contain it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Annotated, Literal

import msgspec

from cluster.lab.simulator.conversations.dialogue import MAX_TOKENS, Ask, Ids
from cluster.lab.simulator.conversations.json_objects import decode
from engine.errors import InvalidParameter

ROUNDING_S = 1e-6  # of recorded times
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Call(msgspec.Struct, frozen=True, tag_field="type", tag="n"):
    t: Seconds
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = msgspec.field(name="in")
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = msgspec.field(name="out")
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None


class StreamedCall(Call, frozen=True, tag_field="type", tag="s"):
    pass


class Subagent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    t: Seconds
    requests: list[Call | StreamedCall]


class WekaTrace(msgspec.Struct, frozen=True):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    requests: list[Call | StreamedCall | Subagent]
    hash_id_scope: Literal["local", "global"] = "local"


def read(objects: Iterable[tuple[str, bytes]], ids: Ids) -> tuple[list[Ask], int]:
    """Return the requests of all conversations, and the tokens of a block. Raises InvalidParameter."""
    asks: list[Ask] = []
    block_size = None
    for session, (place, data) in enumerate(objects):
        trace = decode(WekaTrace, place, data)
        block_size = block_size or trace.block_size
        if trace.block_size != block_size:
            limit = f"that of the first conversation ({block_size})"
            raise InvalidParameter(f"{place}, block_size", trace.block_size, limit)
        recorded = RecordedSession(ids, session, block_size, "all" if trace.hash_id_scope == "global" else session)
        recorded.replay(trace.requests)
        asks += recorded.asks
    return asks, block_size or 1


class RecordedAgent:
    """The calls of one agent, of which no other waits for some yet."""

    def __init__(self, number: int, after: list[Ask], ended_s: float):
        """after: what its first call waits for. ended_s: when these had ended."""
        self.number = number
        self.open: list[tuple[float, Ask]] = []  #: when each of them had ended
        self._after, self._ended_s = after, ended_s

    def before(self, at_s: float) -> tuple[list[Ask], float]:
        """Return what a call at a time waits for, and when that had ended."""
        if ended := [(end, ask) for end, ask in self.open if end <= at_s + ROUNDING_S]:
            self.open = [each for each in self.open if each not in ended]
            self._after, self._ended_s = [ask for _, ask in ended], max(end for end, _ in ended)
        return self._after, self._ended_s


class RecordedSession:
    def __init__(self, ids: Ids, session: int, block_size: int, scope: int | str):
        """scope: where hash ids name the same blocks."""
        self.asks: list[Ask] = []
        self._ids, self._session, self._block_size, self._scope = ids, session, block_size, scope
        self._numbers = count(1)

    def replay(self, requests: Sequence[Call | Subagent]) -> None:
        agent = RecordedAgent(0, [], 0.0)
        for request in requests:
            if isinstance(request, Subagent):
                subagent = RecordedAgent(next(self._numbers), *agent.before(request.t))
                first = request.requests[0].t if request.requests else 0.0
                begun_s = request.t if first + ROUNDING_S < request.t else 0.0
                for call in request.requests:
                    self._call(subagent, call, begun_s + call.t)
                agent.open += subagent.open
            else:
                self._call(agent, request, request.t)

    def _call(self, agent: RecordedAgent, call: Call, at_s: float) -> None:
        after, ended_s = agent.before(at_s)
        think_s = max(0.0, at_s - ended_s if call.think_time is None else call.think_time)
        whole = -(-call.input_length // self._block_size)
        known = [self._ids.of((self._scope, hash_id)) for hash_id in call.hash_ids[:whole]]
        pieces = [*known, *(self._ids.new() for _ in range(whole - len(known)))]
        ask = Ask(
            at_s, call.input_length, max(1, call.output_length), pieces, self._session, agent.number, after, think_s
        )
        self.asks.append(ask)
        agent.open.append((at_s + max(0.0, call.api_time or 0.0), ask))
