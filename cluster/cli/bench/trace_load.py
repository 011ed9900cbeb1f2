"""Requests of a recorded load, or of a drawn one, to be sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.prompts import trace_prompts, with_prefixes
from cluster.cli.bench.traces import read_trace
from cluster.config.idle_flags import given_flags, refuse_idle
from cluster.lab.simulator.conversations.turn import Turn
from cluster.lab.simulator.trace import Trace, is_file, make_trace
from engine.errors import InvalidParameter

FROM_TRACE = "--input-len --output-len --prefix-len --prefix-groups --text --endpoint"
FROM_FILE = "--num-prompts --burstiness"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad(ServeLoad):
    """A load with the times and lengths of a trace. `input_len` and `output_len` are means."""

    trace: Trace

    @classmethod
    def of(cls, name: str, load: ServeLoad) -> TraceLoad:
        """Return the load of a file, or one that is drawn. load: the other options. Raises InvalidParameter."""
        refuse_idle(
            given_flags(load),
            (FROM_TRACE, True, "with --trace, which tells it"),
            (FROM_FILE, is_file(name), "with --trace, which tells it"),
        )
        trace = trace_of(name, load).scaled(load.scale).in_time(load.time_scale)
        if load.max_active_conversations is not None:
            trace = trace.with_active(load.max_active_conversations)
        own: dict[str, Any] = {each.name: getattr(load, each.name) for each in fields(load)}
        own["num_prompts"] = len(trace)
        own["request_rate"] = len(trace) / trace.duration_s if trace.duration_s else math.inf
        own["input_len"] = max(1, round(trace.prompt_tokens.mean()))
        own["output_len"] = max(1, round(trace.output_tokens.mean()))
        return cls(trace=trace, **own)

    @property
    def turns(self) -> Sequence[Turn] | None:
        return self.trace.turns

    def bodies(self, model: str) -> list[bytes]:
        prompts = trace_prompts(self.trace, self.vocab_size, self.seed)
        lengths = self.trace.output_tokens.tolist()
        sent = [
            msgspec.json.encode(self._body(model, prompt, length))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        warm_ups = with_prefixes(self.num_warmups, self.input_len, 0, 1, self.vocab_size, self.seed + 1, text=False)
        return [*(msgspec.json.encode(self._body(model, prompt, self.output_len)) for prompt in warm_ups), *sent]

    def times(self) -> list[float]:
        return list(self.trace.arrivals_s.tolist())

    def full_output(self, completed: int) -> int:
        return int(self.trace.output_tokens.sum()) if completed == self.num_prompts else 0


def trace_of(name: str, load: ServeLoad) -> Trace:
    """Return the requests of a file at their times or at the load's rate, or draw them. Raises InvalidParameter."""
    if is_file(name):
        trace = read_trace(Path(name))
        return trace if math.isinf(load.request_rate) else trace.at_rate(load.request_rate)
    if math.isinf(load.request_rate):
        raise InvalidParameter("request_rate", load.request_rate, f"given with --trace {name}, and finite")
    return make_trace(name, load.num_prompts, load.request_rate, burstiness=load.burstiness, seed=load.seed)
