"""Engines with modelled memory and a modelled network around the real protocol
(engine/kv_transfer/protocol/protocol.py).

What a block holds is modelled as the tokens up to its end, since that is what its KV depends on. Blocks that are given
back are overwritten at once, as if another request had got them. So a token from wrong KV would be seen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.kv_transfer.protocol.messages import Attach, DropSource, Envelope, Message, Read, ReadEnded, StopRead
from engine.kv_transfer.protocol.protocol import HandoffProtocol
from engine.kv_transfer.protocol.receive_state import hash_prompt
from engine.options.handoff import HandoffConfig
from engine.wire.block_hash import block_hashes
from engine.wire.handoff import (
    NO_TOKEN,
    AcceptPrefill,
    BlocksAsked,
    CancelHandoff,
    Closed,
    Failed,
    FinishPrefill,
    FirstToken,
    HandoffEvent,
    HeldBlocks,
    HoldBlocks,
    HoldRequest,
    OpenHandoff,
    PromptCost,
    Received,
    RefusePrefill,
    ReportProgress,
    Spent,
)
from engine.wire.parts.handoffs import RemoteRequestFailed
from engine.wire.remote_request import NOBODY, Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams

BLOCK = 4  # tokens
CONFIG = HandoffConfig(role="decode")  # lease 10 s, heartbeat 1 s, progress and accept 5 s, rest 30 s


@dataclass
class RunningRead:
    """One rank's."""

    command: Read
    rank: int
    done: int = 0
    stopping: bool = False


@dataclass
class Flight:
    """A message on its way."""

    address: str
    envelope: Envelope


@dataclass
class Job:
    """What a prefill engine computes."""

    remote_request: RemoteRequest
    blocks: list[int]
    computed: int


@dataclass
class Engine:
    """`drift` and `offset`: its clock is offset + drift * the world's."""

    world: World
    name: str
    num_ranks: int = 1
    num_blocks: int = 64
    drift: float = 1.0
    offset: float = 0.0
    paused: bool = False
    dead: bool = False
    reads: list[RunningRead] = field(default_factory=list)
    answers: deque[ReadEnded] = field(default_factory=deque)  # of the own workers, not yet handled
    jobs: dict[str, Job] = field(default_factory=dict)
    opened: dict[str, tuple[RemoteRequest, list[int]]] = field(default_factory=dict)
    results: dict[str, HandoffEvent] = field(default_factory=dict)
    cached: dict[bytes, int] = field(default_factory=dict)  # block by name
    asked: deque[BlocksAsked] = field(default_factory=deque)  # by others, not yet answered
    lent: dict[str, list[int]] = field(default_factory=dict)  # blocks held for others, by handoff
    spent: dict[str, int] = field(default_factory=dict)  # on its prompts by other engines, by handoff
    config: HandoffConfig = CONFIG

    def __post_init__(self):
        self.peer = Peer(self.name, f"tcp://{self.name}", next(self.world.epochs))
        self.protocol = HandoffProtocol(
            self.config, self.peer, ranks=[{"fake": b""}] * self.num_ranks, block_size=BLOCK
        )
        self.free = set(range(self.num_blocks))
        self.memory: dict[tuple[int, int], object] = {}  # (rank, block) -> tokens up to its end

    @property
    def now(self) -> float:
        return self.offset + self.drift * self.world.now

    def check(self) -> None:
        """Every block is free or belongs to one handoff, and what counts as validated is right at any time."""
        for handoff_id, handoff in self.protocol.decode_handoffs.items():
            self._check_tokens(*self.opened[handoff_id], handoff.receive_state.verified)
        used = [block for job in self.jobs.values() for block in job.blocks]
        used += [block for _, blocks in self.opened.values() for block in blocks]
        used += {*self.cached.values(), *(block for blocks in self.lent.values() for block in blocks)}
        assert sorted([*self.free, *used]) == list(range(self.num_blocks))

    def flush(self) -> None:
        """Do what the protocol wants done."""
        out = self.protocol.out
        for to, message in out.messages:
            self.world.network.append(Flight(to.address, Envelope(self.peer, to.epoch, message)))
            self.world.sent[type(message).__name__] += 1
        for command in out.commands:
            if isinstance(command, Read):
                self.reads += [RunningRead(command, rank) for rank in range(self.num_ranks)]
            elif isinstance(command, StopRead):
                for read in self.reads:
                    read.stopping |= read.command.read_id == command.read_id
            elif isinstance(command, DropSource):
                for read in self.reads:
                    read.stopping |= read.command.source_epoch == command.source_epoch
            else:
                assert not isinstance(command, Attach)
        for event in out.events:
            self._on_event(event)
        for done in (out.messages, out.commands, out.events, out.lines):
            done.clear()
        self.check()

    def tick(self) -> None:
        self.protocol.tick(self.now)
        self.flush()

    # -- decode ------------------------------------------------------------------------------------------------

    def request(self, tokens: list[int], **more) -> RemoteRequest:
        return RemoteRequest(
            **{
                "handoff_id": f"h{next(self.world.ids)}",
                "request_id": "r",
                "attempt": 1,
                "token_ids": tokens,
                "num_prompt": len(tokens),
                "params": SamplingParams(),
                "seed": 0,
                "cache_salt": "",
                "skip": 0,
                "fingerprint": "f",
                "decode": self.peer,
            }
            | more
        )

    def open(
        self, tokens: list[int], skip: int = 0, source: Peer | None = None, names: Sequence[bytes] = (), **more
    ) -> RemoteRequest:
        """source: engine that holds the request, or the blocks of these names."""
        remote_request = self.request(tokens, skip=skip, **more)
        blocks = self._take(-(-(len(tokens) - skip) // BLOCK))
        assert blocks is not None
        self.opened[remote_request.handoff_id] = remote_request, blocks
        self.protocol.apply(OpenHandoff(remote_request, blocks, source=source, names=list(names)), self.now)
        self.flush()
        return remote_request

    def fetch(self, tokens: list[int], skip: int, source: Peer) -> RemoteRequest:
        return self.open(tokens, skip, source, [b"".join(names_of(tokens)[skip // BLOCK :])])

    def cancel(self, handoff_id: str) -> None:
        self.protocol.apply(CancelHandoff(handoff_id), self.now)
        self.flush()

    def remote_prefill_failed(self, handoff_id: str, reason: str = "died", retry: bool = True) -> None:
        self.protocol.apply(RemoteRequestFailed(handoff_id, reason, retry), self.now)
        self.flush()

    def read_step(self, read: RunningRead, error: str | None = None) -> None:
        """One rank copies one block, or comes to an end. One-sided: who is paused does not matter."""
        command = read.command
        source = self.world.by_epoch(command.source_epoch)
        if error is None and source is None:
            error = "connection lost"
        if error is None and not read.stopping and read.done < len(command.source_blocks):
            local = command.local_blocks[read.done]
            assert local not in self.free, "a block was written after it was given back"
            self.memory[read.rank, local] = source.memory.get((0, command.source_blocks[read.done]))
            read.done += 1
            return
        if error is None and read.done < len(command.source_blocks):
            error = "stopped"
        self.reads.remove(read)
        self.answers.append(ReadEnded(command.read_id, read.rank, "fake", read.done, 0.0, error))

    def hear_worker(self) -> None:
        self.protocol.read_ended(self.answers.popleft(), self.now)
        self.flush()

    # -- prefill -----------------------------------------------------------------------------------------------

    def accept(self, remote_request: RemoteRequest) -> None:
        blocks = self._take(-(-(len(remote_request.token_ids) - remote_request.skip) // BLOCK))
        if blocks is None:
            self.protocol.apply(RefusePrefill(remote_request, "no room"), self.now)
        else:
            assert remote_request.handoff_id not in self.jobs
            self.results.pop(remote_request.handoff_id, None)  # a prefill request may come again after its lease
            self.jobs[remote_request.handoff_id] = Job(remote_request, blocks, remote_request.skip)
            self.protocol.apply(AcceptPrefill(remote_request), self.now)
        self.flush()

    def hold(self, tokens: list[int], **more) -> RemoteRequest | None:
        """Stop a request whose tokens are all computed; None if it never had room."""
        blocks = self._take(-(-len(tokens) // BLOCK))
        if blocks is None:
            return None
        held = self.request(tokens, decode=NOBODY, **more)
        self.jobs[held.handoff_id] = Job(held, blocks, len(tokens))
        for i, block in enumerate(blocks):
            self.memory[0, block] = tuple(tokens[: (i + 1) * BLOCK])
        first = FirstToken(sum(tokens), None, hash_prompt(held, BLOCK), 0)
        self.protocol.apply(HoldRequest(held, [HeldBlocks(0, blocks)], first), self.now)
        self.flush()
        return held

    def cache(self, tokens: list[int]) -> None:
        """Have full blocks of these tokens in the prefix cache, as far as there is room."""
        for i, name in enumerate(names_of(tokens)):
            if name not in self.cached and (taken := self._take(1)) is not None:
                self.cached[name] = taken[0]
                for rank in range(self.num_ranks):
                    self.memory[rank, taken[0]] = tuple(tokens[: (i + 1) * BLOCK])

    def lose(self, count: int) -> None:
        """Lose cached blocks, the newest first. Those that others may read are not used for anything else."""
        for name in list(self.cached)[::-1][:count]:
            block = self.cached.pop(name)
            if not any(block in blocks for blocks in self.lent.values()):
                self._give_back([block])

    def answer(self) -> None:
        """Answer one engine that asks for blocks."""
        asked = self.asked.popleft()
        names = [asked.names[0][i : i + 16] for i in range(0, len(asked.names[0]), 16)]
        blocks = []
        for name in names:
            if name not in self.cached:
                break
            blocks.append(self.cached[name])
        if not blocks:
            self.protocol.apply(RefusePrefill(asked.remote_request, "not cached"), self.now)
        else:
            self.results.pop(asked.handoff_id, None)  # it may ask again after its lease
            self.lent[asked.handoff_id] = blocks
            upto = asked.remote_request.skip + len(blocks) * BLOCK
            first = FirstToken(NO_TOKEN, None, b"", upto)
            self.protocol.apply(HoldBlocks(asked.remote_request, upto, blocks, first), self.now)
        self.flush()

    def compute(self, handoff_id: str, num_tokens: int, wrong_prompt_hash: bool = False) -> None:
        job = self.jobs.get(handoff_id)
        if job is None or job.computed == len(job.remote_request.token_ids):
            return
        tokens, skip = job.remote_request.token_ids, job.remote_request.skip
        job.computed = min(len(tokens), job.computed + num_tokens)
        for i, block in enumerate(job.blocks):
            self.memory[0, block] = tuple(tokens[: min(job.computed, skip + (i + 1) * BLOCK)])
        named = job.blocks[: -(-(job.computed - skip) // BLOCK)]
        spent, at_ns = PromptCost(10 * (job.computed - skip), 1.0), int(self.now * 1e9)
        self.protocol.apply(ReportProgress(handoff_id, job.computed, named, spent, len(job.blocks), at_ns), self.now)
        if job.computed == len(tokens):
            prompt_hash = b"wrong" if wrong_prompt_hash else hash_prompt(job.remote_request, BLOCK)
            first = FirstToken(sum(tokens), None, prompt_hash, 0)
            self.protocol.apply(FinishPrefill(handoff_id, first), self.now)
        self.flush()

    def refuse(self, handoff_id: str, reason: str = "failed") -> None:
        self.protocol.apply(RefusePrefill(self.jobs[handoff_id].remote_request, reason), self.now)
        self.flush()

    # -- parts -------------------------------------------------------------------------------------------------

    def _take(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self.free):
            return None
        return [self.free.pop() for _ in range(num_blocks)]

    def _give_back(self, blocks: list[int]) -> None:
        assert not self.free & set(blocks)
        self.free |= set(blocks)
        for rank in range(self.num_ranks):
            for block in blocks:
                self.memory[rank, block] = object()  # somebody else's KV

    def _check_tokens(self, remote_request: RemoteRequest, blocks: list[int], verified: int) -> None:
        tokens = remote_request.token_ids
        for i, block in enumerate(blocks):
            end = min(len(tokens), remote_request.skip + (i + 1) * BLOCK)
            for rank in range(self.num_ranks):
                if end <= verified:
                    assert self.memory[rank, block] == tuple(tokens[:end]), "wrong KV counted as right"

    def _on_event(self, event: HandoffEvent) -> None:
        if isinstance(event, BlocksAsked):
            self.asked.append(event)
            return
        if isinstance(event, Spent):
            assert event.cost.compute_ns > self.spent.get(event.handoff_id, 0)
            self.spent[event.handoff_id] = event.cost.compute_ns
            return
        assert event.handoff_id not in self.results, "told twice"
        self.results[event.handoff_id] = event
        self.world.outcomes[f"{type(event).__name__} {getattr(event, 'reason', '')}"] += 1
        if isinstance(event, Closed) and event.handoff_id in self.lent:
            held = self.lent.pop(event.handoff_id)
            still = {*self.cached.values(), *(block for blocks in self.lent.values() for block in blocks)}
            self._give_back([block for block in held if block not in still])
            return
        if isinstance(event, Closed):
            self._give_back(self.jobs.pop(event.handoff_id).blocks)
            return
        remote_request, blocks = self.opened.pop(event.handoff_id)
        tokens = remote_request.token_ids
        if isinstance(event, Received) and event.first.token == NO_TOKEN:
            verified = event.first.cached
            assert verified % BLOCK == 0 and remote_request.skip < verified <= len(tokens)
        elif isinstance(event, Received):
            assert event.first.token == sum(tokens)
            verified = len(tokens)
            spent = self.spent.get(event.handoff_id, 0)  # none for a request that moves
            assert spent in (0, 10 * (len(tokens) - remote_request.skip)) and (event.byte_ns > 0) == (spent > 0)
        else:
            assert isinstance(event, Failed)
            verified = event.verified
            assert verified % BLOCK == 0 and remote_request.skip <= verified <= len(tokens)
        self._check_tokens(remote_request, blocks, verified)
        reading = [read.command.local_blocks for read in self.reads]
        assert not any(set(blocks) & set(local) for local in reading), "told before all reads had ended"
        self._give_back(blocks)


def names_of(tokens: list[int]) -> list[bytes]:
    hashes = block_hashes(tokens, BLOCK)
    return [hashes[i : i + 16] for i in range(0, len(hashes), 16)]


class World:
    def __init__(self, prefills: int = 1, decode_ranks: int = 1, num_blocks: int = 64):
        self.now = 100.0
        self.epochs, self.ids = count(1), count(1)
        self.network: list[Flight] = []
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.lossy = False  # lose all messages
        self.engines = {}
        self.start("d", num_ranks=decode_ranks, num_blocks=num_blocks)
        for i in range(prefills):
            self.start(f"p{i}", num_blocks=num_blocks)

    def start(self, name: str, **more) -> Engine:
        """Also in place of one of that name that has died."""
        self.engines[name] = Engine(self, name, **more)
        return self.engines[name]

    def crash(self, name: str, restart: bool = True) -> None:
        old = self.engines[name]
        old.dead = True
        if restart:
            self.start(name, num_ranks=old.num_ranks, num_blocks=old.num_blocks, drift=old.drift, offset=old.offset)

    @property
    def decode(self) -> Engine:
        return self.engines["d"]

    @property
    def prefill(self) -> Engine:
        return self.engines["p0"]

    def by_epoch(self, epoch: int) -> Engine | None:
        return next((e for e in self.engines.values() if e.peer.epoch == epoch and not e.dead), None)

    def by_address(self, address: str) -> Engine | None:
        return next((e for e in self.engines.values() if e.peer.address == address and not e.dead), None)

    def running(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if not engine.paused and not engine.dead]

    def deliver(self, flight: Flight) -> None:
        """To an engine that runs; the one who has it in its socket's buffer gets it when it runs again."""
        engine = self.by_address(flight.address)
        if engine is not None and not engine.dead:
            engine.protocol.receive(flight.envelope, engine.now)
            engine.flush()

    def deliver_now(self, flight: Flight) -> None:
        self.network.remove(flight)
        self.deliver(flight)

    def settle(self, reads: bool = True) -> None:
        """Let everything happen that needs no time."""
        while True:
            flights = [f for f in self.network if not self.waiting_for_grammar(f)]
            steps = [(e, read) for e in self.engines.values() if reads and not e.dead for read in e.reads]
            answers = [e for e in self.running() if e.answers]
            asked = [e for e in self.running() if e.asked]
            if not flights and not steps and not answers and not asked:
                return
            self.network = [f for f in self.network if self.waiting_for_grammar(f)]
            for flight in flights:
                if not self.lossy:
                    self.deliver(flight)
            for engine, read in steps:
                if read in engine.reads:
                    engine.read_step(read)
            for engine in answers:
                if engine.answers:
                    engine.hear_worker()
            for engine in asked:
                engine.answer()

    def advance(self, seconds: float, settle: bool = True, reads: bool = True) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            if settle:
                self.settle(reads)
            for engine in self.running():
                engine.tick()
            if settle:
                self.settle(reads)

    def messages(self, kind: type[Message]) -> list[Message]:
        return [f.envelope.message for f in self.network if isinstance(f.envelope.message, kind)]

    def waiting_for_grammar(self, flight: Flight) -> bool:
        engine = self.by_address(flight.address)
        return engine is not None and engine.paused
