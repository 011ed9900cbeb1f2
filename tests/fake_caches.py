"""Other engines with prefix caches, for a scheduler: they have some blocks and want some, and may fail at any time."""

from __future__ import annotations

from engine.core.kv_cache_manager import KVCacheManager
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.handoffs.inputs import HandoffWentOn
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.parts.kv_tiers.kv_offloading import KVOffloading
from engine.wire.block_hash import BLOCK_HASH_BYTES, block_hashes
from engine.wire.handoff import (
    NO_TOKEN,
    BlocksAsked,
    CancelHandoff,
    Closed,
    Failed,
    FirstToken,
    HandoffEvent,
    HoldBlocks,
    OpenHandoff,
    Received,
    RefusePrefill,
)
from engine.wire.parts.kv_fetching import KVHolder
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams
from tests.fake_runner import Harness
from tests.fake_tiers import TierHarness

HERE, THERE = Peer("here", "", 1), Peer("there", "", 2)
TIMEOUT_S = 2.0
NONSENSE = ("nonsense",)


def split(names: bytes) -> list[bytes]:
    return [names[i : i + BLOCK_HASH_BYTES] for i in range(0, len(names), BLOCK_HASH_BYTES)]


class CacheHarness(Harness):
    """A scheduler that fetches from another engine, and from which others fetch. What has not come yet is overwritten
    with nonsense before every step; what others may read is read again after every step."""

    def __init__(self, *, min_tokens: int = 1, **options):
        self._min_tokens = min_tokens
        super().__init__(handoffs=Handoffs(None, HERE, "print"), **options)
        self.open: dict[str, OpenHandoff] = {}
        self.cancelled: set[str] = set()
        self.held: dict[str, HoldBlocks] = {}
        self.asked: dict[str, list[bytes]] = {}  # names
        self.refused: dict[str, str] = {}
        self.known: dict[bytes, list[int]] = {}  # tokens up to the end of a block, by its name

    def make_fetching(
        self, kv_cache: KVCacheManager, handoffs: Handoffs | None, offloading: KVOffloading | None
    ) -> KVFetching:
        assert handoffs is not None
        return KVFetching(
            kv_cache,
            handoffs,
            offloading,
            peer=HERE,
            times=self.step_times,
            timeout_s=TIMEOUT_S,
            block_bytes=[2**20] * len(kv_cache.groups),
            min_tokens=self._min_tokens,
        )

    @property
    def fetching(self) -> KVFetching:
        return self.scheduler.parts[KVFetching]

    def add(self, name: str, prompt: list[int], *, held: int = 0, **more) -> None:
        """held: tokens that the other engine is believed to have."""
        self.learn(prompt)
        super().add(name, prompt, kv_holder=KVHolder(THERE, held) if held else None, **more)

    def learn(self, tokens: list[int]) -> list[bytes]:
        """Return the names of the full blocks of these tokens."""
        size = self.config.block_size
        names = split(block_hashes(tokens, size))
        self.known.update((name, tokens[: (i + 1) * size]) for i, name in enumerate(names))
        return names

    # -- the other engine has blocks -----------------------------------------------------------------------

    def receive(self, handoff_id: str, blocks: int | None = None) -> None:
        """blocks: that it has; all if None. A part is of use only if it is all of the KV of some tokens."""
        upto = self._write(self.open.pop(handoff_id), blocks)
        self.handle(Received(handoff_id, FirstToken(NO_TOKEN, None, b"", upto)))

    def fail(self, handoff_id: str, blocks: int = 0) -> None:
        """blocks: that came."""
        upto = self._write(self.open.pop(handoff_id), blocks)
        self.handle(Failed(handoff_id, "read", upto, retry=False))

    def _write(self, handoff: OpenHandoff, blocks: int | None) -> int:
        """Write the first blocks, and nonsense into all others. Returns how many tokens are complete."""
        request, size = handoff.remote_request, self.config.block_size
        groups = [handoff.blocks, *handoff.others]
        if blocks is None or blocks >= sum(map(len, groups)):
            blocks, upto = None, len(request.token_ids)
        elif len(groups) == 1 and len(handoff.blocks) * size == len(request.token_ids) - request.skip:
            upto = request.skip + blocks * size
        else:
            blocks, upto = 0, request.skip
        for group, (local, names) in enumerate(zip(groups, handoff.names, strict=True)):
            for i, (block, name) in enumerate(zip(local, split(names), strict=True)):
                tokens = self.known[name] if blocks is None or i < blocks else None
                if group == len(self.runner.kvs):
                    self.runner.snapshots[block] = NONSENSE if tokens is None else tuple(tokens)
                    continue
                for offset in range(size):
                    seen = NONSENSE if tokens is None else tuple(tokens[: len(tokens) - size + offset + 1])
                    self.runner.kvs[group][block * size + offset] = seen
        return upto

    # -- the other engine wants blocks ---------------------------------------------------------------------

    def ask(self, name: str, prompt: list[int], skip: int = 0, fingerprint: str = "print") -> None:
        """Ask for all KV of the full blocks of a prompt, without the first `skip` blocks."""
        size = self.config.block_size
        hashes = self.learn(prompt)
        needed = [list(manager.needed(hashes)) for manager in self.scheduler.kv_cache.groups]
        wanted = [[each for each in group if each not in hashes[:skip]] for group in needed]
        asked = RemoteRequest(
            handoff_id=name, request_id="theirs", attempt=1, token_ids=[], num_prompt=0, params=SamplingParams(),
            seed=0, cache_salt="", skip=skip * size, fingerprint=fingerprint, decode=THERE, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        self.asked[name] = [each for group in wanted for each in group]
        self.handle(BlocksAsked(asked, len(hashes) * size, [b"".join(group) for group in wanted]))

    def close(self, name: str) -> None:
        del self.held[name]
        self.handle(Closed(name, "released"))

    def read(self) -> None:
        """Read what others may read."""
        size, groups = self.config.block_size, self.scheduler.kv_cache.groups
        for name, held in self.held.items():
            blocks = iter(held.blocks)
            place = {each: group for group, manager in enumerate(groups) for each in manager.needed(self.asked[name])}
            if len(groups) > 1:
                assert len(held.blocks) == len(self.asked[name])
                continue
            for each in self.asked[name][: len(held.blocks)]:
                block, tokens = next(blocks), self.known[each]
                for offset in range(size):
                    seen = tuple(tokens[: len(tokens) - size + offset + 1])
                    assert self.runner.kvs[place[each]][block * size + offset] == seen, "other KV would be read"

    # -- the engine ----------------------------------------------------------------------------------------

    def handle(self, event: HandoffEvent) -> None:
        self.scheduler.apply(HandoffWentOn(event), self.now)
        self.forward()
        self.scheduler.check()

    def plan(self):
        for handoff in self.open.values():
            self._write(handoff, 0)
        plan = super().plan()
        self.forward()
        self.read()
        return plan

    def commit(self) -> None:
        super().commit()
        self.read()

    def forward(self) -> None:
        for action in self.scheduler.take_messages("engines"):
            match action:
                case OpenHandoff(remote_request, source=source):
                    assert source == THERE
                    self.open[remote_request.handoff_id] = action
                case CancelHandoff(handoff_id):
                    self.cancelled.add(handoff_id)
                case HoldBlocks(remote_request):
                    self.held[remote_request.handoff_id] = action
                case RefusePrefill(remote_request, reason):
                    self.refused[remote_request.handoff_id] = reason
                case _:
                    raise AssertionError(action)

    def settle(self) -> None:
        if self.open:
            self.receive(next(iter(self.open)))
        else:
            self.close(next(iter(self.held)))

    def drain(self) -> None:
        while self.open or self.held:
            self.settle()


class TieredCacheHarness(CacheHarness, TierHarness):
    """The same with tiers below the cache, from which others fetch too."""

    def settle(self) -> None:
        if self.open or self.held:
            CacheHarness.settle(self)
        else:
            TierHarness.settle(self)

    def drain(self) -> None:
        self.pass_time()
        while self.open or self.held or self.moving or self.answers:
            if self.open or self.held:
                CacheHarness.settle(self)
            TierHarness.drain(self)
            assert self.scheduler.schedule(self.now) is None
            self.forward()
