"""Requests of a recorded load, to be sent again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from cluster.cli.bench.load import ServeLoad
from cluster.cli.bench.prompts import trace_prompts, with_prefixes
from cluster.cli.bench.traces import read_trace
from cluster.config.idle_flags import given_flags, refuse_idle
from cluster.lab.simulator.trace import Trace

FROM_TRACE = "--num-prompts --burstiness --input-len --output-len --prefix-len --prefix-groups --text --endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad(ServeLoad):
    """A load with the times and lengths of a trace. `input_len` and `output_len` are means."""

    trace: Trace

    @classmethod
    def of(cls, path: Path, load: ServeLoad) -> TraceLoad:
        """Return the load of a file. load: the other options. Raises InvalidParameter."""
        refuse_idle(given_flags(load), (FROM_TRACE, True, "with --trace, which tells it"))
        own: dict[str, Any] = {each.name: getattr(load, each.name) for each in fields(load)}
        trace = read_trace(path)
        if load.request_rate != float("inf"):
            trace = trace.at_rate(load.request_rate)
        own["num_prompts"] = len(trace)
        own["request_rate"] = len(trace) / trace.duration_s if trace.duration_s else float("inf")
        own["input_len"] = max(1, round(trace.prompt_tokens.mean()))
        own["output_len"] = max(1, round(trace.output_tokens.mean()))
        return cls(trace=trace, **own)

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
