"""Decides which adapters are in slots on the device, and which waiting requests may start. Pure Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.door.kernel import Kernel
from engine.core.door.part import Part
from engine.core.request import Request
from engine.core.request_queue import RequestQueue
from engine.core.step_plan_builder import StepPlanBuilder
from engine.lora.errors import AdapterError
from engine.lora.messages import AdapterLoad, AdapterStats, SequenceAdapter
from engine.parts.kept import ADAPTER, adapter_of
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.adapter import ModelAdapter, digest_of, extra_keys
from engine.wire.plan import StepPlan
from engine.wire.remote_request import RemoteRequest


@dataclass(slots=True, eq=False)  # compared by identity
class AdapterSlot:
    """One slot on the device, and the adapter in it."""

    lora: ModelAdapter | None = None
    load: int = 0
    """Number of the command that loads the adapter; 0 once it is loaded."""
    last_step: int = 0
    """The last planned step that reads the adapter."""
    kept_for: Request | None = None
    """The first request that can start with the adapter; None once one has started."""
    wanted_by: Request | None = None
    """A waiting request whose adapter gets this slot next, unless an earlier request needs it. Later requests with the
    slot's present adapter do not start."""

    @property
    def digest(self) -> str:
        return "" if self.lora is None else self.lora.digest


class NoAdapterSlots(Part):
    """Of an engine without adapters."""

    asks = ModelAdapter

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        if (lora := asked.record(ModelAdapter)) is not None:
            raise AdapterError.without_slots(lora.name)


def waits_before(other: Request | None, request: Request) -> bool:
    """Return whether another request still waits, and comes before one."""
    return other is not None and other.is_waiting and other.order < request.order


class AdapterSlots(Part):
    """Gives each adapter of running requests a slot. A new adapter replaces the least recently used one.

    A request whose adapter is not in a slot is skipped, so that later ones start meanwhile. If running sequences use
    all slots, the request marks the slot with the fewest sequences. Later requests for the adapter in that slot then
    wait behind it, so a popular adapter cannot keep another adapter out for ever. A slot is kept for the first
    request that can start with its adapter, but not from one before it, which may come later: preempted, or more
    urgent.
    """

    asks = ModelAdapter
    _queue: RequestQueue

    def __init__(self, max_loras: int):
        self.slots = [AdapterSlot() for _ in range(max_loras)]
        self._by_digest: dict[str, AdapterSlot] = {}
        self._running: dict[Request, AdapterSlot] = {}
        self._committed = 0
        self._num_loads = 0

    def attach(self, kernel: Kernel) -> None:
        super().attach(kernel)
        self._queue = kernel.queue

    @property
    def max_loras(self) -> int:
        return len(self.slots)

    @property
    def loading(self) -> bool:
        """Whether an adapter is being loaded into a slot."""
        return any(slot.load for slot in self.slots)

    @property
    def digests(self) -> list[str]:
        """Digests of the adapters that requests can start with now."""
        return [slot.digest for slot in self.slots if slot.lora is not None and not slot.load]

    def check(self, asked: GenerateRequest | RemoteRequest, prompt: Sequence[int]) -> None:
        if (lora := asked.record(ModelAdapter)) is not None:
            self.check_adapter(lora)

    def check_adapter(self, lora: ModelAdapter) -> None:
        """Raise AdapterError if this engine cannot compute requests with the adapter."""
        if not lora.digest:
            raise AdapterError(lora.name, "digest", "", "the digest of the adapter's files")

    def opened(self, request: Request, asked: GenerateRequest | RemoteRequest) -> None:
        if (lora := asked.record(ModelAdapter)) is not None:
            request.of[ADAPTER] = lora
            request.prefix.extra_keys += extra_keys(lora.digest)

    def may_start(self, request: Request) -> bool:
        """Return whether a waiting request may start: a slot has its adapter, and no earlier request waits for that
        slot. If no slot has the adapter, it is loaded as soon as a slot is free."""
        if (lora := adapter_of(request)) is None:
            return True
        slot = self._by_digest.get(lora.digest)
        if slot is None:
            self._bring(request, lora)
            return False
        if slot.load or waits_before(slot.wanted_by, request):
            return False
        if not waits_before(slot.kept_for, request):
            slot.kept_for = request  # from later ones, which may be looked at before it starts
        return True

    def started(self, request: Request) -> None:
        if (lora := adapter_of(request)) is not None:
            slot = self._running[request] = self._by_digest[lora.digest]
            slot.kept_for = None
            request.attach(SequenceAdapter(self.slots.index(slot)))

    def planned(self, plan: StepPlanBuilder, step: int) -> None:
        for request in plan.requests:
            if (slot := self._running.get(request)) is not None:
                slot.last_step = step

    def step_ended(self, plan: StepPlan) -> None:
        self._committed = plan.step

    def load(self, requests: Iterable[Request]) -> dict[str, Any]:
        return {"adapters": tuple(self.digests)}

    def report(self) -> AdapterStats:
        queue = self._queue
        return AdapterStats(self.max_loras, self.digests, names_in(queue.running), names_in(queue.waiting))

    def new_load(self, lora: ModelAdapter) -> int:
        """Ask the ranks to read an adapter into host memory. Returns the command's number."""
        self.check_adapter(lora)
        load = AdapterLoad(self._new_number(), lora)
        self.out.post("adapters", load)
        return load.number

    def loaded(self, number: int, failed: bool) -> ModelAdapter | None:
        """Record that a load command has succeeded on all ranks or failed on one. Returns the adapter if loading it
        into a slot has failed, else None."""
        slot = next((slot for slot in self.slots if slot.load == number), None)
        if slot is None:
            return None
        slot.load, lora = 0, slot.lora
        if failed:
            self._empty(slot)
        return lora if failed else None

    def audit(self, running: Sequence[Request]) -> None:
        """Raise AssertionError if a running request's adapter is not in a slot."""
        for request in running:
            if (lora := adapter_of(request)) is not None:
                slot = self._running[request]
                assert slot.digest == lora.digest and not slot.load, "a slot was taken from a running request"
        assert {slot.digest: slot for slot in self.slots if slot.lora} == self._by_digest

    def _new_number(self) -> int:
        self._num_loads += 1
        return self._num_loads

    def _bring(self, request: Request, lora: ModelAdapter) -> None:
        self._running = {user: slot for user, slot in self._running.items() if user.slot >= 0}
        used = Counter(self._running.values())
        marked = next((slot for slot in self.slots if self._is_wanted_for(slot, lora)), None)
        ready = [s for s in self.slots if not s.load and (s is marked or not waits_before(s.wanted_by, request))]
        idle = [slot for slot in ready if not used[slot] and not self._is_needed(slot, request)]
        if idle:
            slot = min(idle, key=lambda slot: (slot.lora is not None, slot.last_step))
            self._empty(slot)
            if marked is not None:
                marked.wanted_by = None
            slot.lora, slot.load, slot.kept_for = lora, self._new_number(), request
            self._by_digest[lora.digest] = slot
            self.out.post("adapters", AdapterLoad(slot.load, lora, self.slots.index(slot)))
        elif marked is None and ready:
            min(ready, key=used.__getitem__).wanted_by = request

    def _is_needed(self, slot: AdapterSlot, request: Request) -> bool:
        """Return whether a slot must keep its adapter, and `request` has to wait: a step that has not ended reads it,
        or an earlier request waits that can start with it."""
        return slot.last_step > self._committed or waits_before(slot.kept_for, request)

    def _is_wanted_for(self, slot: AdapterSlot, lora: ModelAdapter) -> bool:
        """Return whether a slot is marked for an adapter. First removes the mark of a request that no longer waits."""
        if slot.wanted_by is not None and not slot.wanted_by.is_waiting:
            slot.wanted_by = None
        return slot.wanted_by is not None and digest_of(adapter_of(slot.wanted_by)) == lora.digest

    def _empty(self, slot: AdapterSlot) -> None:
        self._by_digest.pop(slot.digest, None)
        slot.lora = slot.kept_for = slot.wanted_by = None


def names_in(requests: Iterable[Request]) -> list[str]:
    """Return the names of the requests' adapters, each once."""
    return list(dict.fromkeys(lora.name for each in requests if (lora := adapter_of(each)) is not None))
