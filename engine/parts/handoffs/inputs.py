"""What enters a scheduler for its handoffs."""

from __future__ import annotations

from engine.core.door.inputs import KernelWithParts, PartInput
from engine.core.request import Request, State
from engine.parts.handoffs.handoffs import Handoffs
from engine.wire.handoff import HandoffEvent
from engine.wire.parts.handoffs import PrefillReplica
from engine.wire.remote_request import RemoteRequest
from engine.wire.stats.handoff_stats import Role


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


class LinksRest(PartInput, frozen=True):
    """The engines that are asked for no KV for now, since the links to them have just failed."""

    engines: list[str]

    def apply(self, scheduler: KernelWithParts, now: float) -> None:
        scheduler.parts[Handoffs].rest(self.engines)


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
