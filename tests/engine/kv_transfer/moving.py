"""Two engines between which requests move; the test plays the ingress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.core.output import Event
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.part_record import PartRecord
from engine.wire.parts.handoffs import MoveRequests
from engine.wire.remote_request import KVSource
from engine.wire.sampling_params import SamplingParams, seed_of
from engine.wire.token_delta import TokenDelta, TokenLogprob
from tests.engine.kv_transfer.pair import Engine, Pair
from tests.engine_sockets import Ingress
from tests.rank_pool import TIMEOUT_S, RankPool

KEPT = ("needs", "hints", "cache_salt", "timeout_s")  # fields of a request, wherever it goes on


@dataclass
class Stream:
    """What a client has asked for, and what it has got."""

    request: GenerateRequest
    deltas: list[TokenDelta] = field(default_factory=list)
    num_moves: int = 0
    last: TokenDelta | None = None
    """The delta with which its engine has ended it, or let it go."""

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs or []]


class Gate:
    """Steps of an engine: none is computed while the gate is closed, so requests cannot end before the test has started
    all of them. `leave_at` stops the requests in the engine's own thread, however long the test's thread stalls."""

    def __init__(self, engine: Engine):
        self._server, self._step, self._open = engine.server, engine.server._core.step, threading.Event()
        self._leave: tuple[int, int] | None = None
        self.open()
        engine.server._core.step = self._step_of_test  # type: ignore[method-assign]

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def leave_at(self, running: int, tokens: int) -> None:
        """Let all requests move once so many run, each with at least so many tokens of output."""
        self._leave = running, tokens

    def _step_of_test(self) -> list[Event]:
        assert self._open.wait(TIMEOUT_S), "the test does not go on"
        events = self._step()
        if self._leave is not None:
            count, tokens = self._leave
            queue = self._server._core.scheduler.queue
            if len(queue.running) == count and all(r.num_output >= tokens for r in queue.running):
                self._leave = None
                self._server._endpoint.handle(MoveRequests(len(queue.live)))
        return events


class Movers(Pair):
    """Requests start in the first engine. An engine that is given requests computes once the test listens to it."""

    def __init__(self, first: EngineConfig, second: EngineConfig, ranks: tuple[RankPool, RankPool]):
        super().__init__(first, second, ranks)
        self.ingresses = [self.ingress, Ingress(self._context, self.prefill.server)]
        self.streams: dict[str, Stream] = {}
        self.gates = [Gate(engine) for engine in self.engines]

    def __exit__(self, *ending: Any) -> None:
        for gate in self.gates:
            gate.open()
        super().__exit__(*ending)

    def start(self, name: str, prompt: list[int], *records: PartRecord, **options: Any) -> Stream:
        fields = {key: options.pop(key) for key in KEPT if key in options}
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **options})
        request = GenerateRequest(
            request_id=name, prompt=prompt, params=params, reply_to=self.ingresses[0].address, **fields
        ).asking(*records)
        self.streams[name] = Stream(request)
        self.gates[0].close()
        self.ingresses[0].send(Add(request))
        return self.streams[name]

    def listen(self, where: int, until: Callable[[], bool]) -> None:
        """Take what an engine sends; one batch at a time."""
        ingress = self.ingresses[where]
        self.gates[where].open()
        while not until():
            for delta in ingress.receive().deltas:
                name, _, move = delta.request_id.partition("@")
                stream = self.streams[name]
                assert int(move or 0) == stream.num_moves, "the engine went on with a request that had left it"
                assert delta.position == len(stream.tokens) or delta.error, "a token is missing, or there are two"
                stream.deltas.append(delta)
                stream.last = delta if delta.finish_reason else None

    def ended(self) -> bool:
        return all(stream.last is not None for stream in self.streams.values())

    def stopped(self) -> list[str]:
        """Names of the streams that have left one engine, and go on in none yet."""
        lasts = {name: stream.last for name, stream in self.streams.items()}
        return [name for name, last in lasts.items() if last and last.error and last.error.code == "moved"]

    def leave(self, where: int, tokens: int = 3, running: int | None = None) -> None:
        """Stop all requests in an engine once they run and each has so many more tokens than the shortest has now.
        Afterwards they have no engine. running: number that runs; all, if it is not given."""
        lengths = [len(stream.tokens) for stream in self.streams.values() if stream.last is None]
        self.gates[where].leave_at(len(lengths) if running is None else running, min(lengths) + tokens)
        self.listen(where, self.ended)

    def arrive(self, where: int, keep_source: bool = True) -> None:
        """Let an engine go on with all that has stopped. keep_source: else it does not know where the KV is."""
        self.gates[where].close()
        for name in self.stopped():
            stream = self.streams[name]
            last, stream.last = stream.last, None
            assert last is not None
            stream.num_moves += 1
            params, request = stream.request.params, stream.request
            seed = (seed_of(name) + 2**63) % 2**64 - 2**63 if params.seed is None else params.seed
            fields = {key: getattr(request, key) for key in KEPT}
            again = GenerateRequest(
                request_id=f"{name}@{stream.num_moves}",
                prompt=[*request.prompt, *stream.tokens],
                num_prompt=len(request.prompt),
                params=SamplingParams(**{f: getattr(params, f) for f in params.__struct_fields__} | {"seed": seed}),
                reply_to=self.ingresses[where].address,
                **fields,
            ).asking(*(last.records(KVSource) if keep_source else ()))
            self.ingresses[where].send(Add(again))
