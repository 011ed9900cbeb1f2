"""Manages snapshots of recurrent states as one more KV cache group. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from engine.core.block_pool import BlockPool
from engine.core.door.part import Part
from engine.core.request import BlockTable, Request
from engine.core.single_type_kv_cache_manager import Below, SingleTypeKVCacheManager, nowhere
from engine.core.step_plan_builder import StepPlanBuilder
from engine.parts.kv_groups.request_states import NEVER, STATES, RequestStates, StateSnapshot, held_by, states_of
from engine.wire.parts.states import StateRestore, StateSave, StateStep


class StateCacheManager(SingleTypeKVCacheManager):
    """Decides which recurrent states are saved, and from which of them a sequence resumes.

    A block of its pool is a snapshot: the states of all recurrent layers at a border, a position that is a multiple of
    the pool's block size. A snapshot is named by the hash of the block chain up to its border, so a prefix counts as
    cached up to its last border that has a snapshot.

    A state takes as much memory as the KV of thousands of tokens. So states are saved only where they are likely to be
    needed: at the last border of a prompt, where a prompt diverges from an earlier one, every `interval` tokens, and at
    the newest border of generated text. The last kind serves preempted sequences and the next turn of a conversation;
    each such snapshot replaces the one before.

    A request holds a snapshot only while it is written, read or handed over; all others can be evicted. If the pool has
    no room for a snapshot, it is not saved.
    """

    kind = "mamba"
    shows_load = False  # most snapshots can be evicted

    def __init__(self, pool: BlockPool, kv_cache: SingleTypeKVCacheManager, interval: int, group: int = 1):
        """kv_cache: manager of the first KV cache group, whose prefix cache shows where prompts diverge. interval:
        tokens between the snapshots inside a long sequence, 0 for none."""
        super().__init__(pool, group)
        self._kv_cache, self._interval = kv_cache, interval
        self._kv_size = kv_cache.pool.block_size
        self._restored: list[StateRestore] = []
        self._read: list[tuple[int, Request]] = []  # snapshots that are held until the step is planned

    # -- prefixes ------------------------------------------------------------------------------------------

    def longest_hit(self, hashes: Sequence[bytes], below: Below = nowhere) -> int:
        step = self.pool.block_size // self._kv_size
        borders = range(len(hashes) // step * step, 0, -step)
        return next((count for count in borders if self._has(hashes[count - 1], below)), 0)

    def least(self, max_model_len: int) -> int:
        return 2  # one to start from, and one that another engine writes or reads

    def needed(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return hashes[-1:]

    def worth_storing(self, request: Request) -> Sequence[bytes]:
        known, size = min(request.computed, len(request.tokens)), self.pool.block_size
        borders = [self._hash(request, position) for position in range(size, known + 1, size)]
        return [each for each in borders if self.pool.has(each)]

    def in_flight(self, request: Request, matched: int, running: Iterable[Request]) -> bool:
        """Return whether a running step will save the state at a border of this request after its `matched` blocks."""
        first, last = matched * self._kv_size, len(request.tokens) - 1
        return any(
            first < position <= min(last, len(other.tokens))
            and self._hash(other, position) == self._hash(request, position)
            for other in running
            for position in coming(other)
        )

    # -- what a request holds ------------------------------------------------------------------------------

    def plan(self, request: Request, matched: int, start: int, tokens: int) -> tuple[BlockTable, int]:
        """Return a table with the snapshot that a request starts from, and 1 if a handoff needs one more, else 0."""
        position, last = matched * self._kv_size, self._last_border(request)
        remote = start > position
        needed = (
            last > position if remote else request.asked_by is not None and last > max(position, request.asked_by.skip)
        )
        source = [] if not position or (remote and needed) else self.pool.match([self._hash(request, position)])
        return BlockTable(source, matched), int(needed)

    def take(self, request: Request, table: BlockTable, missing: int) -> None:
        snapshots = self.pool.reserve(table.blocks, missing, holder=request)
        assert snapshots is not None
        position, last = table.num_cached * self._kv_size, self._last_border(request)
        states = request.of[STATES] = RequestStates()
        request.handed_over = [[]]
        if table.blocks:
            states.source = StateSnapshot(position, snapshots[0])
        if missing and request.asked_by is None:  # another engine computes the prompt and sends this state
            states.saves.append(StateSnapshot(last, snapshots[-1]))
            request.handed_over = [[self._share(request, snapshots[-1])]]
            return
        if missing or (request.asked_by is not None and position == last > request.asked_by.skip):
            request.handed_over = [[snapshots[-1] if missing else self._share(request, snapshots[0])]]
        self._choose_borders(request, position, last)

    def _choose_borders(self, request: Request, position: int, last: int) -> None:
        """Decide at which borders to save the state of a sequence that is computed from `position` to `last`."""
        states = states_of(request)
        borders: set[int] = set()
        if self.pool.enable_prefix_caching:
            if self._interval:
                borders.update(range(position // self._interval * self._interval, last, self._interval))
            if self._kv_cache.pool.enable_prefix_caching:
                known = self._kv_cache.longest_hit(request.hashes(last // self._kv_size, self._kv_size))
                borders.add(known * self._kv_size // self.pool.block_size * self.pool.block_size)
            borders.add(last)
            size = self.pool.block_size
            borders.update(mark // size * size for mark in request.marks)
        elif any(request.handed_over):
            borders.add(last)
        states.wanted = sorted(border for border in borders if position < border <= last)
        self._set_next(states, position)

    def add_sequence(self, request: Request) -> None:
        states = states_of(request)
        source, states.source = states.source, None
        if source is not None:
            assert source.position == request.computed
            self._restored.append(StateRestore(request.slot, source.snapshot))
            self._read.append((source.snapshot, request))

    def received(self, request: Request) -> int:
        states = states_of(request)
        if states.saves:
            position, snapshot = states.saves.popleft()
            states.source = StateSnapshot(position, self._cache(request, position, snapshot))
            self.pool.release(request.handed_over.pop(), request)
        position = 0 if states.source is None else states.source.position
        states.wanted = []
        self._set_next(states, position)
        return position

    def grow(self, request: Request, tokens: int) -> bool:
        return True

    def cache_blocks(self, request: Request, computed: int) -> None:
        """Enter the snapshots within the first `computed` tokens into the prefix cache."""
        states, known = states_of(request), min(computed, len(request.tokens))
        while states.saves and states.saves[0].position <= known:
            position, snapshot = states.saves.popleft()
            name = self._hash(request, position)
            self.pool.release([self._cache(request, position, snapshot)], request)
            self.pool.discard(states.newest)
            passing = position > states.last_wanted and not (self._interval and position % self._interval == 0)
            states.newest = name if passing else b""

    def invalidate(self, request: Request, first: int = 0) -> None:
        size = self.pool.block_size
        known = min(request.computed, len(request.tokens)) // size
        for border in range(first * self._kv_size // size + 1, known + 1):
            self.pool.discard(self._hash(request, border * size))

    def to_continue(self, request: Request) -> tuple[int, list[int]] | None:
        position = self._last_border(request)
        found = self.pool.match([self._hash(request, position)]) if position else []
        if position and not found:
            return None
        request.handed_over = [[self._share(request, snapshot) for snapshot in found]]
        return position // self._kv_size - 1, found

    def held(self, request: Request) -> list[int]:
        return held_by(request)

    def free(self, request: Request) -> None:
        self.pool.release(held_by(request), request)
        request.of[STATES], request.handed_over = RequestStates(), []

    # -- steps ---------------------------------------------------------------------------------------------

    def take_states(self, requests: list[Request]) -> StateStep | None:
        """Return the snapshots that the step of these requests restores and saves; None if there are none."""
        # Not when the sequence was added: another engine might have been told to write the snapshot before this step
        # has read it. What this step saves, and what later ones do, follows the read.
        for snapshot, request in self._read:
            self.pool.release([snapshot], request)
        restored, self._restored, self._read = self._restored, [], []
        saved = [
            save
            for request in requests
            if request.computed >= states_of(request).next_save and (save := self._save(request))
        ]
        return StateStep(restored, saved) if restored or saved else None

    def _save(self, request: Request) -> StateSave | None:
        """Plan to save the state at the border that a step passes. Returns None if there is no room."""
        states, size = states_of(request), self.pool.block_size
        position = request.computed // size * size
        while states.wanted and states.wanted[0] <= request.computed:
            position = states.last_wanted = states.wanted.pop(0)
        self._set_next(states, request.computed)
        if any(request.handed_over) and position == self._last_border(request):
            found: list[int] | None = [self._share(request, request.handed_over[0][0])]
        else:
            found = self.pool.allocate(1, request)
        if found is None:
            return None
        states.saves.append(StateSnapshot(position, found[0]))
        return StateSave(request.slot, position, found[0])

    def _set_next(self, states: RequestStates, computed: int) -> None:
        size = self.pool.block_size
        rolling = (computed // size + 1) * size if self.pool.enable_prefix_caching else NEVER
        states.next_save = states.wanted[0] if states.wanted else rolling

    # ------------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every snapshot is free, cached, or held by these requests."""
        held = Counter(snapshot for request in holders for snapshot in held_by(request))
        self.pool.check(held + Counter(snapshot for snapshot, _ in self._read))

    def _last_border(self, request: Request) -> int:
        """Return the last border before the newest token, which is always computed."""
        return (len(request.tokens) - 1) // self.pool.block_size * self.pool.block_size

    def _hash(self, request: Request, position: int) -> bytes:
        return request.hashes(position // self._kv_size, self._kv_size)[-1]

    def _cache(self, request: Request, position: int, snapshot: int) -> int:
        """Enter a snapshot into the prefix cache, and return the one to use from now on."""
        end = position // self.pool.block_size
        self.pool.describe(request, end - 1, end)
        return self.pool.cache_block(snapshot, self._hash(request, position), request)

    def _share(self, request: Request, snapshot: int) -> int:
        """Take one more reference to a snapshot for a request, and return the snapshot."""
        self.pool.reserve([snapshot], 0, holder=request)
        return snapshot


class StateSnapshots(Part):
    """Adds snapshots to the plans of steps. Keeps a step from passing two wanted borders of one sequence, since a step
    can save only one state of each."""

    def __init__(self, states: StateCacheManager):
        self.states = states

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        if (states := self.states.take_states(plan.requests)) is not None:
            plan.attach(states)

    def up_to(self, request: Request, count: int) -> int:
        wanted = states_of(request).wanted
        return count if len(wanted) < 2 else min(count, wanted[1] - 1 - request.computed)


def coming(request: Request) -> Iterator[int]:
    """Yield the borders at which planned steps save the state of a request."""
    for save in states_of(request).saves:
        yield save.position
    if states_of(request).next_save <= request.computed:  # in the step that is being planned
        yield states_of(request).next_save
