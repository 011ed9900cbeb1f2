"""An engine without a model: the protocol of engine.serving.server.EngineServer, with scripted tokens."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.core.stats import RequestMetrics
from engine.lora.messages import AdapterLoaded, LoadAdapter
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Abort, Add, Answer, Command, EngineStatus, Notice, Question, ResetPrefixCache, kinds_of
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.cache_writes import HoldOutcome
from engine.wire.parts.costs import ReportCost, SequenceCost
from engine.wire.parts.handoffs import (
    CancelDispatch,
    CancelPrefill,
    DispatchRemote,
    Prefill,
    PrefillReplicas,
    RemoteRequestFailed,
)
from engine.wire.parts.holds import GiveHolds, HeldPrompt, HeldPrompts, HoldMark, PromptHold, ReleaseHolds
from engine.wire.parts.pooling import PoolingParams
from engine.wire.parts.speculation import Prediction, Verified
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.stats.handoff_stats import HandoffStats
from engine.wire.timeline import TimelineEvent
from engine.wire.token_delta import ErrorInfo, TokenBatch, TokenDelta, TokenLogprob
from tests.engine_stats import engine_stats

Script = Callable[[GenerateRequest], list[int]]
POLL_MS = 5
EOS = 2  # <|im_end|>


def granted(mark: HoldMark) -> HoldOutcome:
    return HoldOutcome(tokens=mark.tokens, ttl_s=mark.ttl_s)


class FakeEngine:
    """One token per step and request, in a thread of its own. Requests with `pooling` get what `pooled` says.

    script: the answer to a request, up to EOS or to whatever else is its last token; the default repeats the prompt.
    step_ms: the time of a step, in which clients can leave and tests can intervene.
    paused: set it, and no step is computed; requests that come then tell that they are queued.
    silent: set it, and no status is sent.
    refusal: if given, the answer to new requests. failure: if given, it ends those that run.
    step_age_s, fingerprints, quarantined, costs: what it reports of itself.
    loaded: adapters that it was to read, and answered with `adapter_error`.
    cost: of every request; its last delta tells it, and with `ReportCost` every one.
    hold_answer: what becomes of each hold. released: commands to end holds. held: what it gives to other engines, which
    fetch from `peer`.
    answers: to questions of a kind.
    remote_requests: that it was given, and ended unless paused. told: what became of those that it gave.
    """

    def __init__(self, status_to: str, script: Script | None = None, step_ms: int = POLL_MS):
        self.paused, self.silent = threading.Event(), threading.Event()
        self.refusal: ErrorInfo | None = None
        self.failure: ErrorInfo | None = None
        self.step_age_s = 0.0
        self.cost: SequenceCost | None = None
        self.costs: dict[str, float] = {}
        self.added: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.fingerprint = ""
        self.encode_fingerprint = ""
        self.quarantined: list[str] = []
        self.quarantined_encode: list[str] = []
        self.remote_requests: list[RemoteRequest] = []
        self.cancelled: list[str] = []
        self.resets = 0
        self.released: list[ReleaseHolds] = []
        self.hold_answer: Callable[[HoldMark], HoldOutcome] = granted
        self.held: list[HeldPrompt] = []
        self.peer: Peer | None = None
        self.answers: dict[type[Question], Any] = {}
        self.cached_tokens = 0
        self.loaded: list[ModelAdapter] = []
        self.adapter_error: ErrorInfo | None = None
        self.told: list[RemoteRequestFailed | PrefillReplicas] = []
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._step_ms = step_ms
        self._script = script or (lambda request: request.prompt * 100)
        self._live: dict[str, tuple[GenerateRequest, deque[int]]] = {}
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._commands.bind_to_random_port('tcp://127.0.0.1')}"
        self._status = self._connect(status_to)
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._ended: list[str] = []
        self._steps = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def notify(self, notice: DispatchRemote | CancelDispatch) -> None:
        """Send this to the control actor."""
        self._notices.put(notice)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._commands.poll(self._step_ms if self._live else POLL_MS):
                message = self._commands.recv()
                with suppress(msgspec.DecodeError):  # another process may still send to whoever had this port before
                    self._handle(msgspec.msgpack.decode(message, type=kinds_of(Command)))
            while not self._notices.empty():
                self._status.send(msgspec.msgpack.encode(self._notices.get()))
            if not self.paused.is_set():
                self._step()
            if not self.silent.is_set():
                self._send_status()
        self._context.destroy(linger=0)

    def _handle(self, command: Command) -> None:
        match command:
            case Add(request) if self.refusal is not None:
                self._send(
                    request, TokenDelta(request_id=request.request_id, finish_reason="error", error=self.refusal)
                )
            case Add(request):
                self.added.append(request)
                self._live[request.request_id] = (request, deque(self._script(request)[: request.params.max_tokens]))
                if self.paused.is_set():
                    queued = [TimelineEvent.now("queued")]
                    self._send(request, TokenDelta(request_id=request.request_id, timeline=queued))
            case Abort(request_id, reason):
                (self.aborted if reason == "abort" else self.stopped).append(request_id)
                if request_id in self._live:
                    request, _ = self._live[request_id]
                    self._send(request, TokenDelta(request_id=request_id, finish_reason=reason))
            case Prefill(remote_request):
                self.remote_requests.append(remote_request)
            case CancelPrefill(handoff_id):
                self.cancelled.append(handoff_id)
            case GiveHolds(limit):
                given, self.held = self.held[:limit], self.held[limit:]
                self._notices.put(Answer.to(command, HeldPrompts(self.peer, given)))
            case ReleaseHolds():
                self.released.append(command)
            case ResetPrefixCache():
                self.resets += 1
            case LoadAdapter(lora):
                self.loaded.append(lora)
                self._notices.put(Answer.to(command, AdapterLoaded(self.adapter_error)))
            case RemoteRequestFailed() | PrefillReplicas():
                self.told.append(command)
            case Question() if type(command) in self.answers:
                self._notices.put(Answer.to(command, self.answers[type(command)]))

    def _step(self) -> None:
        self._steps += 1
        self._ended += [remote_request.handoff_id for remote_request in self.remote_requests]
        for request, answer in list(self._live.values()):
            if self.failure is not None:
                failed = TokenDelta(request_id=request.request_id, finish_reason="error", error=self.failure)
                self._send(request, failed)
                continue
            if request.record(PoolingParams) is not None:
                delta = TokenDelta(request_id=request.request_id, answer=pooled(request), finish_reason="stop")
                self._send(request, delta)
                continue
            token, first = answer.popleft(), request.params.max_tokens == len(answer) + 1
            logprob = None
            if request.params.logprobs is not None:
                logprob = [TokenLogprob(token, -0.5, 1, [(token, -0.5)][: request.params.logprobs])]
            prompt = None
            if request.params.prompt_logprobs is not None and first:
                prompt = [None, *(TokenLogprob(t, -1.0, 2, []) for t in request.prompt[1:])]
            reason = None if answer else "stop" if token == EOS else "length"
            position = len(self._script(request)[: request.params.max_tokens]) - len(answer) - 1
            hold = request.record(PromptHold)
            delta = TokenDelta(
                request_id=request.request_id,
                position=position,
                token_ids=[token],
                logprobs=logprob,
                prompt_logprobs=prompt,
                finish_reason=reason,  # type: ignore[arg-type]
                timeline=[TimelineEvent.now("first token")] if first else [],
                num_cached_tokens=0 if position else self.cached_tokens,
            )
            if hold is not None and not position:
                delta = delta.telling(*(self.hold_answer(mark) for mark in hold.marks))
            if Prediction.part in request.hints:
                delta = delta.telling(Verified(1, 2))
            self._send(request, delta)

    def _send(self, request: GenerateRequest, delta: TokenDelta) -> None:
        if request.reply_to not in self._peers:
            self._peers[request.reply_to] = self._connect(request.reply_to)
        if self.cost is not None and (delta.finish_reason is not None or request.record(ReportCost) is not None):
            delta = delta.telling(self.cost)
        if delta.finish_reason is not None:  # before anybody can know that it has ended
            self._live.pop(request.request_id, None)
            self._ended.append(request.request_id)
        batch = TokenBatch(engine_id="fake", commands_to=self.address, step=self._steps, deltas=[delta])
        self._peers[request.reply_to].send(msgspec.msgpack.encode(batch))

    def _send_status(self) -> None:
        stats = engine_stats(
            running=self.num_live,
            blocks_free=10 - self.num_live,
            blocks_used=self.num_live,
            steps=self._steps,
            finished={"stop": 0, "length": 1},
            histograms=RequestMetrics().histograms,
            **self.costs,
        )
        status = EngineStatus(
            engine_id="fake",
            ended=self._ended,
            stats=stats,
            last_step_age_s=self.step_age_s,
            handoffs=HandoffStats(quarantined=self.quarantined),
            image_handoffs=HandoffStats(quarantined=self.quarantined_encode),
            fingerprint=self.fingerprint,
            encode_fingerprint=self.encode_fingerprint,
        )
        self._ended = []
        self._status.send(msgspec.msgpack.encode(status))

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(address)
        return socket


def pooled(request: GenerateRequest) -> bytes:
    """A vector of the prompt's first token, its last one, its length and their sum, for a task of tokens once for each
    token; or a score, which is its length."""
    prompt = request.prompt
    params = request.record(PoolingParams)
    assert params is not None
    if params.asked == "score":
        return np.array([len(prompt)], "<f4").tobytes()
    vector = np.array([prompt[0], prompt[-1], len(prompt), sum(prompt)], "<f4")[: params.dimensions]
    return vector.tobytes() * (len(prompt) if params.of_tokens else 1)
