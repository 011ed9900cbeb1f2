"""A prefill and a decode engine in processes that may die, over links that may fail. The test plays those around them:
the control actors, which carry prefill requests and notice that a process is gone, and an ingress, which replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from engine.config import EngineConfig
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add, Command, EngineStatus, EngineUpdate, Notice, Subscribe, kinds_of
from engine.wire.parts.adapter import ModelAdapter
from engine.wire.parts.handoffs import (
    CancelDispatch,
    CancelPrefill,
    DispatchRemote,
    Prefill,
    PrefillReplica,
    PrefillReplicas,
    RemoteRequestFailed,
)
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch, TokenDelta
from tests.engine.kv_transfer.engine_process import EngineProcess
from tests.engine.kv_transfer.link import Link, address_of
from tests.engine.kv_transfer.pair import is_empty
from tests.engine_sockets import bind
from tests.processes import outlives_test

LIMIT_S = 60.0  # only bounds a failure
POLL_MS = 20


@dataclass
class Asked:
    """What a client wants, and what it has got. engine: who has it. ended_at: on time.monotonic."""

    request: GenerateRequest
    engine: str
    tokens: list[int] = field(default_factory=list)
    last: TokenDelta | None = None
    ended_at: float = 0.0


class Member:
    """One engine, from the start of its process until it is killed."""

    def __init__(self, context: zmq.Context, process: EngineProcess, config: EngineConfig, name: str):
        self.name, self.process = name, process
        self.notices, notices = inbox(context)
        self.tokens, self.reply_to = inbox(context)
        self._commands = context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.LINGER, 0)
        self.is_ready, self.transports = False, 0
        self.known: EngineStatus | None = None
        self.ended: set[str] = set()
        process.start(config, name, notices)

    @property
    def status(self) -> EngineStatus:
        """The newest one."""
        assert self.known is not None and self.known.handoffs is not None
        return self.known

    def reach_at(self, address: str) -> None:
        self._commands.connect(address)
        self.is_ready = True

    def send(self, command: Command) -> None:
        self._commands.send(msgspec.msgpack.encode(command))

    def kill(self) -> None:
        self.process.kill()
        for end in (self.notices, self.tokens, self._commands):
            end.close(linger=0)


class FaultyPair:
    """One thread: the control actors and the ingress act only while the test waits with `until`.

    links: `to decode` and `to prefill` carry messages between the engines, `data` what decode reads from prefill.
    is_settled: nothing was asked since `settle`.
    """

    def __init__(self, decode: EngineConfig, prefill: EngineConfig):
        self._configs = {"decode": decode, "prefill": prefill}
        self._context = zmq.Context()
        outlives_test.add(self._context)
        self.links: dict[str, Link] = {}
        self.members: dict[str, Member] = {}
        self.asked: dict[str, Asked] = {}
        self.is_settled = True
        self._open: set[str] = set()  # handoffs whose prefill requests prefill has
        self._looks = 0
        self._spares = [EngineProcess(), EngineProcess()]
        for name in self._configs:
            self.start(name)

    def close(self) -> None:
        for member in self.members.values():
            member.kill()
        for spare in self._spares:
            spare.kill()
        for link in self.links.values():
            link.close()
        self._context.destroy(linger=0)

    @property
    def decode(self) -> Member:
        return self.members["decode"]

    @property
    def prefill(self) -> Member:
        return self.members["prefill"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to this: {what}"
            self._pump()

    # -- processes -----------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """A new process, reached where the one before it was. Requests that died with that one are replayed."""
        assert name not in self.members
        member = self.members[name] = Member(self._context, self._spares.pop(0), self._configs[name], name)
        self.until(lambda: member.is_ready and member.known is not None, f"{name} runs")
        self._spares.append(EngineProcess())  # for the next time
        if "decode" in self.members:
            self._tell_pool()
        if name == "decode":
            for asked in self.asked.values():
                if asked.engine == name and asked.last is None:
                    self._send(asked)

    def kill(self, name: str) -> None:
        """SIGKILL. The control actor of decode hears of it at once; prefill hears nothing when decode dies."""
        self.members.pop(name).kill()
        if name == "prefill":
            for handoff_id in self._open:
                self.decode.send(RemoteRequestFailed(handoff_id, "the prefill replica died", True))
            self._tell_pool()
        self._open.clear()

    def _tell_pool(self) -> None:
        alive = [PrefillReplica(engine_id="prefill")] if "prefill" in self.members else []
        self.decode.send(PrefillReplicas(alive))

    # -- requests ------------------------------------------------------------------------------------------

    def peer_of(self, name: str) -> Peer:
        """An engine as routers know it, from which others may fetch KV."""
        updates, address = inbox(self._context)
        self.members[name].send(Subscribe(address))
        self.until(lambda: bool(updates.poll(0)), f"{name} reports")
        peer = msgspec.msgpack.decode(updates.recv(), type=EngineUpdate).peer
        updates.close(linger=0)
        assert peer is not None
        return peer

    def ask(
        self,
        name: str,
        prompt: list[int],
        to: str = "decode",
        holder: KVHolder | None = None,
        lora: ModelAdapter | None = None,
        **params: Any,
    ) -> Asked:
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
        request = GenerateRequest(request_id=name, prompt=prompt, params=settings).asking(lora, holder)
        self.asked[name] = Asked(request, to)
        self.is_settled = False
        self._send(self.asked[name])
        return self.asked[name]

    def _send(self, asked: Asked) -> None:
        """With what it has got already, as an ingress that replays."""
        member, request = self.members[asked.engine], asked.request
        again = {"prompt": request.prompt + asked.tokens, "num_prompt": len(request.prompt)} if asked.tokens else {}
        member.send(Add(msgspec.structs.replace(request, reply_to=member.reply_to, **again)))

    def end_of(self, name: str) -> Asked:
        asked = self.asked[name]
        self.until(lambda: asked.last is not None, f"{name} ends")
        return asked

    def settle(self) -> None:
        """Until neither engine holds anything; then the books must balance."""
        for member in self.members.values():
            deadline = time.monotonic() + LIMIT_S
            while not is_empty(self.look(member)):
                assert time.monotonic() < deadline, f"{member.name} still holds something: {member.status}"
            stats = member.status.stats
            assert (stats.blocks_reserved, stats.blocks_leased, stats.blocks_used) == (0, 0, 0)
            assert stats.blocks_total == stats.blocks_free + stats.blocks_cached
            member.process.check()
        self.is_settled = True

    def look(self, member: Member) -> EngineStatus:
        """How it is now, not some time ago: a request that is refused ends at once, and its end is told in a status."""
        self._looks += 1
        name = f"look {self._looks}"
        self.ask(name, [], to=member.name)
        self.until(lambda: name in member.ended, f"{member.name} answers")
        return member.status

    # -- what goes on meanwhile ----------------------------------------------------------------------------

    def _pump(self) -> None:
        poller = zmq.Poller()
        for member in self.members.values():
            for source in (member.notices, member.tokens, member.process.pipe.fileno()):
                poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(POLL_MS))
        for member in self.members.values():
            if member.process.pipe.fileno() in ready:
                self._answer(member)
            if member.notices in ready:
                for message in drain(member.notices):
                    self._handle(member, msgspec.msgpack.decode(message, type=kinds_of(Notice)))
            if member.tokens in ready:
                for message in drain(member.tokens):
                    self._gather(msgspec.msgpack.decode(message, type=TokenBatch))

    def _answer(self, member: Member) -> None:
        try:
            what, value = member.process.pipe.recv()
        except EOFError:
            raise AssertionError(f"{member.name} has ended by itself") from None
        if what == "ready":
            member.reach_at(value)
        elif what == "data":
            described = value  # nobody reads from decode
            if member.name == "prefill":
                member.transports += 1  # a model with states has a second one
                name = "data" if member.transports == 1 else f"data {member.transports}"
                described = self._link(name, *address_of(value)).describe(value)
            member.process.pipe.send(described)
        else:
            host, port = value.removeprefix("tcp://").split(":")
            host, port = self._link(f"to {member.name}", host, int(port)).address
            member.process.pipe.send(f"tcp://{host}:{port}")

    def _link(self, name: str, host: str, port: int) -> Link:
        """The link of this name; it leads there from now on."""
        if name in self.links:
            self.links[name].lead_to(host, port)
        else:
            self.links[name] = Link(host, port)
        return self.links[name]

    def _handle(self, member: Member, notice: Notice) -> None:
        match notice:
            case EngineStatus():
                member.known = notice
                member.ended |= set(notice.ended)
                if member.name == "prefill":
                    self._open -= member.ended
            case DispatchRemote(remote_request):
                if "prefill" in self.members and self.prefill.is_ready:
                    self._open.add(remote_request.handoff_id)
                    self.prefill.send(Prefill(remote_request))
                else:
                    self.decode.send(
                        RemoteRequestFailed(remote_request.handoff_id, "there is no prefill replica", True)
                    )
            case CancelDispatch(handoff_id):
                if handoff_id in self._open:
                    self.prefill.send(CancelPrefill(handoff_id))

    def _gather(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            asked = self.asked[delta.request_id]
            assert asked.last is None, f"{delta.request_id} went on after its end"
            asked.tokens += delta.token_ids
            if delta.finish_reason:
                asked.last, asked.ended_at = delta, time.monotonic()


def inbox(context: zmq.Context) -> tuple[zmq.Socket, str]:
    end = context.socket(zmq.PULL)
    return end, bind(end)


def drain(end: zmq.Socket) -> Iterator[bytes]:
    while end.poll(0):
        yield end.recv()
