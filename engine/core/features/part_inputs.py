"""What enters a scheduler for one of its parts."""

from __future__ import annotations

from typing import Any, Protocol

from engine.core.door.inputs import PartInput
from engine.core.features.adapter_slots import AdapterSlots, NoAdapterSlots
from engine.core.features.handoffs import STUCK, HandoffManager
from engine.core.features.holds.holds import Holds, NoHolds
from engine.core.features.images.encoder_cache_manager import EncoderCacheManager, TextOnly
from engine.core.features.kv_fetching import KVFetching, NoFetching
from engine.core.features.kv_loading import KVLoading
from engine.core.features.kv_offloading import KVOffloading, NoOffloading
from engine.core.request_queue import RequestQueue
from engine.errors import Overloaded, ServingError
from engine.wire.handoff import HandoffEvent
from engine.wire.kv_offload import StoreListing, TierAnswer
from engine.wire.lora import LoRARequest
from engine.wire.messages import PrefillReplica
from engine.wire.stats.handoff_stats import Role


class Parts(Protocol):
    """A scheduler as its parts see it."""

    queue: RequestQueue
    handoffs: HandoffManager
    images: EncoderCacheManager | TextOnly
    fetching: KVFetching | NoFetching
    holds: Holds | NoHolds
    adapters: AdapterSlots | NoAdapterSlots
    loading: KVLoading
    offloading: KVOffloading | NoOffloading

    def apply(self, given: PartInput, now: float) -> Any:
        """Take an input."""

    def handle(self, event: HandoffEvent, now: float) -> None:
        """Record the progress of a handoff."""

    def abort(self, request_id: str, now: float, error: ServingError | None = None) -> None:
        """End a request, as Aborted does."""


class HandoffWentOn(PartInput, frozen=True):
    """The progress of a handoff."""

    event: HandoffEvent

    def apply(self, parts: Parts, now: float) -> None:
        parts.handle(self.event, now)


class StuckRefused(PartInput, frozen=True):
    """Refuses the prompts of other engines that could wait for blocks for ever (HandoffManager.stuck)."""

    def apply(self, parts: Parts, now: float) -> None:
        for request in parts.handoffs.stuck(parts.queue, now):
            parts.abort(request.request_id, now, Overloaded(STUCK))


class ReplicasSet(PartInput, frozen=True):
    """The engines that can compute prompts for this one."""

    replicas: list[PrefillReplica]

    def apply(self, parts: Parts, now: float) -> None:
        parts.handoffs.set_prefill_replicas(self.replicas)


class RoleSet(PartInput, frozen=True):
    role: Role

    def apply(self, parts: Parts, now: float) -> None:
        parts.handoffs.switch(self.role)


class LinksRest(PartInput, frozen=True):
    """The engines that get no requests for KV for now, since the links to them have just failed."""

    engines: list[str]
    of_images: bool = False
    """Whether these are the links to encode engines."""

    def apply(self, parts: Parts, now: float) -> None:
        if self.of_images:
            parts.images.handoffs.resting = self.engines
            return
        parts.fetching.resting = self.engines
        if parts.handoffs.policy is not None:
            parts.handoffs.policy.resting = self.engines


class ImageWentOn(PartInput, frozen=True):
    """An encode engine has sent an image, or has not."""

    event: HandoffEvent

    def apply(self, parts: Parts, now: float) -> None:
        parts.images.handoffs.handle(self.event)


class EncodersSet(PartInput, frozen=True):
    """The encode engines that are up."""

    replicas: list[PrefillReplica]

    def apply(self, parts: Parts, now: float) -> None:
        parts.images.handoffs.replicas = self.replicas


class HoldsReleased(PartInput, frozen=True):
    """Ends the holds of this name. client: whose holds end; None for all clients."""

    name: str
    client: str | None

    def apply(self, parts: Parts, now: float) -> None:
        parts.holds.release(self.name, self.client)


class HoldsGiven(PartInput, frozen=True):
    """Up to `limit` holds leave for other engines. `apply` returns them."""

    limit: int

    def apply(self, parts: Parts, now: float) -> Any:
        return parts.holds.give(self.limit, now)


class TimePassed(PartInput, frozen=True):
    """Holds and tiers go on in an engine that plans no more steps."""

    def apply(self, parts: Parts, now: float) -> None:
        parts.holds.update(now)
        parts.loading.update(now)


class AdapterNumbered(PartInput, frozen=True):
    """An adapter to be read into host memory on all ranks. `apply` returns the number of the command."""

    lora: LoRARequest

    def apply(self, parts: Parts, now: float) -> int:
        return parts.adapters.new_load(self.lora)


class AdapterRead(PartInput, frozen=True):
    """The command with this number has been carried out. If it has failed, the requests end that wait for the adapter
    in that slot."""

    number: int
    error: Any = None
    """A ServingError if it has failed on a rank."""

    def apply(self, parts: Parts, now: float) -> None:
        lora = parts.adapters.loaded(self.number, failed=self.error is not None)
        waiting = [] if lora is None else [r for r in parts.queue.waiting if r.prefix.adapter == lora.digest]
        for request in waiting:
            parts.abort(request.request_id, now, self.error)


class TiersAnswered(PartInput, frozen=True):
    answers: list[TierAnswer | StoreListing]

    def apply(self, parts: Parts, now: float) -> None:
        parts.loading.answered(self.answers, now)
