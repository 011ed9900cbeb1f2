"""What enters a scheduler for one of its parts."""

from __future__ import annotations

from typing import Any, Protocol

from engine.core.door.inputs import PartInput
from engine.core.door.kernel import Kernel
from engine.core.door.part import Parts
from engine.core.features.adapter_slots import AdapterSlots
from engine.core.features.handoffs.handoffs import Handoffs
from engine.core.features.holds.holds import Holds
from engine.core.features.images.encoder_cache_manager import EncoderCacheManager
from engine.core.features.kv_fetching import KVFetching
from engine.core.features.kv_offloading import KVOffloading
from engine.core.request import Request, State
from engine.errors import AdapterError
from engine.wire.handoff import HandoffEvent
from engine.wire.kv_offload import StoreListing, TierAnswer
from engine.wire.lora import LoRARequest
from engine.wire.messages import PrefillReplica
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import Role


class KernelWithParts(Kernel, Protocol):
    """A scheduler with its parts."""

    parts: Parts


class AddedRemote(PartInput, frozen=True):
    """A prompt that another engine asked for. `apply` returns it as the scheduler keeps it, or raises a ServingError
    and changes nothing."""

    asked_by: RemoteRequest

    def apply(self, scheduler: KernelWithParts, now: float) -> Request:
        return scheduler.parts[Handoffs].add(self.asked_by, now)


class MovesAsked(PartInput, frozen=True):
    """Other engines are to continue up to `count` requests. Waiting requests leave at once. If `count` is not reached,
    running requests leave after their next token, with their KV."""

    count: int

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        others = [request for request in scheduler.parts.kept() if request.state is not State.LEASED]
        scheduler.parts[Handoffs].move(others, self.count, now)


class HandoffWentOn(PartInput, frozen=True):
    """The progress of a handoff."""

    event: HandoffEvent

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Handoffs].handle(self.event, now)


class StuckRefused(PartInput, frozen=True):
    """Refuses the prompts of other engines that could wait for blocks for ever (Handoffs.refuse_stuck)."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Handoffs].refuse_stuck(now)


class ReplicasSet(PartInput, frozen=True):
    """The engines that can compute prompts for this one."""

    replicas: list[PrefillReplica]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Handoffs].set_prefill_replicas(self.replicas)


class RoleSet(PartInput, frozen=True):
    role: Role

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Handoffs].switch(self.role)


class LinksRest(PartInput, frozen=True):
    """The engines that get no requests for KV for now, since the links to them have just failed."""

    engines: list[str]
    of_images: bool = False
    """Whether these are the links to encode engines."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        if self.of_images:
            scheduler.parts[EncoderCacheManager].handoffs.resting = self.engines
            return
        if (fetching := scheduler.parts.get(KVFetching)) is not None:
            fetching.resting = self.engines
        if (policy := scheduler.parts[Handoffs].remote.policy) is not None:
            policy.resting = self.engines


class ImageWentOn(PartInput, frozen=True):
    """An encode engine has sent an image, or has not."""

    event: HandoffEvent

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[EncoderCacheManager].handoffs.handle(self.event)


class EncodersSet(PartInput, frozen=True):
    """The encode engines that are up."""

    replicas: list[PrefillReplica]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[EncoderCacheManager].handoffs.replicas = self.replicas


class HoldsReleased(PartInput, frozen=True):
    """Ends the holds of this name. client: whose holds end; None for all clients."""

    name: str
    client: str | None

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        if (holds := scheduler.parts.get(Holds)) is not None:
            holds.release(self.name, self.client)


class HoldsGiven(PartInput, frozen=True):
    """Up to `limit` holds leave for other engines. `apply` returns them."""

    limit: int

    def apply(self, scheduler: KernelWithParts, now: float) -> Any:
        return [] if (holds := scheduler.parts.get(Holds)) is None else holds.give(self.limit, now)


class TimePassed(PartInput, frozen=True):
    """Parts go on in an engine that plans no more steps."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        for update in scheduler.parts.update:
            update(now)


class AdapterNumbered(PartInput, frozen=True):
    """An adapter to be read into host memory on all ranks. `apply` returns the number of the command."""

    lora: LoRARequest

    def apply(self, scheduler: KernelWithParts, now: float) -> int:
        if (slots := scheduler.parts.get(AdapterSlots)) is None:
            raise AdapterError.without_slots(self.lora.lora_name)
        return slots.new_load(self.lora)


class AdapterRead(PartInput, frozen=True):
    """The command with this number has been carried out. If it has failed, the requests end that wait for the adapter
    in that slot."""

    number: int
    error: Any = None
    """A ServingError if it has failed on a rank."""

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        lora = scheduler.parts[AdapterSlots].loaded(self.number, failed=self.error is not None)
        waiting = [] if lora is None else [r for r in scheduler.queue.waiting if r.prefix.adapter == lora.digest]
        for request in waiting:
            scheduler.abort(request.request_id, now, self.error)


class TiersAnswered(PartInput, frozen=True):
    answers: list[TierAnswer | StoreListing]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        for answer in self.answers:
            scheduler.parts[KVOffloading].answered(answer, now)
