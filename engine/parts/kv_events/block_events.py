"""Publishes which blocks the prefix cache has, and their tokens, in vLLM's format. Uses no sockets itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from engine.core.block_pool import BlockObserver
from engine.core.mail.courier import Courier
from engine.core.request import Request
from engine.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from engine.parts.kept import adapter_of
from engine.wire.parts.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent

MEDIUM = "GPU"  # vLLM's name of the cache itself, on any device


class Publisher(Protocol):
    """Sends batches to subscribers, without waiting for them."""

    def send(self, events: list[KVCacheEvent]) -> None: ...
    def close(self) -> None: ...


class Source(NamedTuple):
    """The place of a block in a request, which has the block's tokens."""

    request: Request
    number: int
    """Index among the request's blocks of this size."""


class KVEvents(Courier):
    """Publishes one batch after each step that has changed the prefix cache."""

    def __init__(self, groups: Sequence[SingleTypeKVCacheManager], publisher: Publisher, int_hashes: bool = True):
        """int_hashes: send the low 64 bits of hashes as integers instead of all 16 bytes."""
        self._publisher = publisher
        block_size = groups[0].pool.block_size
        self._groups = [BlockEvents(number, group, block_size, int_hashes) for number, group in enumerate(groups)]
        for group, events in zip(groups, self._groups, strict=True):
            group.pool.observers.append(events)

    def step_ended(self) -> None:
        """Send what has changed since the last call."""
        if any(group.has_changes for group in self._groups):
            cleared: list[KVCacheEvent] = (
                [AllBlocksCleared()] if any(group.is_cleared for group in self._groups) else []
            )
            events = cleared + [event for group in self._groups for event in group.take()]
            if events:
                self._publisher.send(events)

    def close(self) -> None:
        self._publisher.close()


class BlockEvents(BlockObserver):
    """Collects what has changed in the pool of one KV cache group. A block that is stored and removed again between two
    calls of `take`, or removed and stored again, is not reported."""

    def __init__(self, group: int, manager: SingleTypeKVCacheManager, hashed_tokens: int, int_hashes: bool):
        """hashed_tokens: tokens per hash of a request; a block of this group may have several times as many."""
        self._group, self._kind, self._window = group, manager.kind, manager.window
        self._size, self._hashed_tokens, self._int_hashes = manager.pool.block_size, hashed_tokens, int_hashes
        self._step = self._size // hashed_tokens
        self._sources: dict[bytes, Source] = {}
        self._changes: dict[bytes, Source | None] = {}  # by hash; None: removed
        self._without_tokens: set[bytes] = set()  # blocks that are not reported, since no request has told their tokens
        self.is_cleared = False

    @property
    def has_changes(self) -> bool:
        return self.is_cleared or bool(self._changes) or bool(self._sources)

    def describe(self, request: Request, first: int, end: int) -> None:
        hashes = request.hashes(end * self._step, self._hashed_tokens)
        for index in range(first, end):
            self._sources[hashes[(index + 1) * self._step - 1]] = Source(request, index)

    def stored(self, block_hash: bytes) -> None:
        """Record a block, unless a tier has filled it for another engine: then no request here has its tokens."""
        if source := self._sources.get(block_hash):
            self._change(block_hash, source)
        else:
            self._without_tokens.add(block_hash)

    def removed(self, block_hash: bytes) -> None:
        if block_hash in self._without_tokens:
            self._without_tokens.remove(block_hash)
        else:
            self._change(block_hash, None)

    def _change(self, block_hash: bytes, source: Source | None) -> None:
        if block_hash in self._changes:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = source

    def cleared(self) -> None:
        self._changes.clear()
        self._without_tokens.clear()
        self.is_cleared = True

    def take(self) -> Iterator[KVCacheEvent]:
        """Yield the events since the last call, or since the cache was last cleared, if that was later. The caller
        itself reports the clearing."""
        changes, self._changes, self._sources, self.is_cleared = self._changes, {}, {}, False
        if removed := [self._sent(each) for each, source in changes.items() if source is None]:
            yield BlockRemoved(block_hashes=removed, medium=MEDIUM, group_idx=self._group)
        run: list[tuple[bytes, Source]] = []
        for block_hash, source in changes.items():
            if source is None:
                continue
            if run and source != (run[-1][1].request, run[-1][1].number + 1):
                yield self._run(run)
                run = []
            run.append((block_hash, source))
        if run:
            yield self._run(run)

    def _run(self, run: list[tuple[bytes, Source]]) -> BlockStored:
        """Return the event of consecutive blocks of one request."""
        (request, first), count, size = run[0][1], len(run), self._size
        keys = [extra_keys(request, (first + i) * size, (first + i + 1) * size) for i in range(count)]
        return BlockStored(
            block_hashes=[self._sent(block_hash) for block_hash, _ in run],
            parent_block_hash=self._sent(request.prefix.hashes[first * self._step - 1]) if first else None,
            token_ids=request.tokens[first * size : (first + count) * size],
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None if (adapter := adapter_of(request)) is None else adapter.name,
            extra_keys=keys if any(keys) else None,
            group_idx=self._group,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._window,
        )

    def _sent(self, block_hash: bytes) -> BlockHash:
        return int.from_bytes(block_hash[-8:], "big") if self._int_hashes else block_hash


def extra_keys(request: Request, start: int, end: int) -> tuple[object, ...] | None:
    """Return what the KV of tokens [start, end) depends on besides the tokens before `end`, in vLLM's order; None if
    the tokens alone determine it."""
    names = () if (adapter := adapter_of(request)) is None else (adapter.name,)
    images = tuple(
        (name.hex(), offset - start) for offset, stop, name in request.prefix.places if offset < end and start < stop
    )
    salt = (request.prefix.salt,) if request.prefix.salt and not start else ()
    return (*names, *images, *salt) or None
