"""Divides the replicas of a model between answering requests and computing prompts. Pure Python: the caller passes the
time, in seconds.

A replica changes its role in about a second, and a new replica takes much longer to start. So replicas change roles as
soon as one role lacks some, and new replicas are requested only if there are too few for both roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.autoscaling.scaler import MAX_GROWTH, ModelScaler, PoolLoad, ReplicaLoad, ScalingDecision, Stabilizer
from cluster.autoscaling.slo import Limits, RoleSettings, Slo
from deployments.routing.config import Role

KEEP_S = 10.0  # time for which a role keeps a replica that it no longer needs
YIELD_S = 2.0  # the same if the other role needs the replica
MEMORY_S = 3.0  # time over which rates are averaged; shorter than for new replicas, since a wrong role costs little
REPORT_S = 5.0  # time for which roles stay as they are while a replica that is up has not reported
WORTH = 0.8  # factor by which the pressure must fall for a change while both roles lack replicas
ROLES: tuple[Role, ...] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Member:
    """A replica with its role."""

    role: Role
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """What the replicas should do from now on."""

    replicas: int  #: number of replicas of both roles
    roles: dict[str, Role]  #: role of each replica that has reported
    decisions: dict[Role, ScalingDecision]  #: how many of `replicas` are for each role, and why


class Needs:
    """How many replicas each role has needed in the last few seconds."""

    def __init__(self, limits: Mapping[Role, Limits], seconds: float):
        self.of: dict[Role, int] = {role: limits[role].min_replicas for role in ROLES}
        self._limits, self._keepers = limits, {role: Stabilizer(0.0, seconds) for role in ROLES}

    def update(self, wishes: Mapping[Role, ScalingDecision], now: float) -> None:
        for role, wish in wishes.items():
            need = self._keepers[role].stabilize(wish.desired, self.of[role], now)
            self.of[role] = max(need, self._limits[role].min_replicas)


class RoleScaler:
    """Decides how many replicas there are, and which role each of them has."""

    def __init__(self, slo: Slo, decode: Limits, settings: RoleSettings):
        """decode: limits of the role `decode`."""
        self._limits: dict[Role, Limits] = {"decode": decode, "prefill": settings.prefill}
        self._settings, self._scaler = settings, ModelScaler(slo, self._limits, MEMORY_S)
        self._kept, self._needs = (Needs(self._limits, seconds) for seconds in (KEEP_S, YIELD_S))
        self._total = Stabilizer(decode.upscale_delay_s, decode.downscale_delay_s)
        self._prefill = settings.initial_prefill  # replicas for prompts unless needs require another number
        self._new, self._complete_at = True, -1.0  # _complete_at: when all replicas had last reported

    def decide(
        self, members: Mapping[str, Member], waiting: int, waiting_tokens: int, target: int, running: int, now: float
    ) -> RoleDecision:
        """members: replicas that have reported, by id. waiting, waiting_tokens: sequences in ingresses, and the tokens
        of their prompts. target, running: number of replicas that are desired, and of those that are up."""
        loads = {role: self._load(role, members) for role in ROLES}
        waits = self._waits_for_reports(len(members), running, now)
        if self._new:  # replicas that have roles already got them from an earlier controller
            self._prefill, self._new = loads["prefill"].running_replicas or self._settings.initial_prefill, waits
        loads["decode"] = replace(loads["decode"], waiting=waiting, waiting_tokens=waiting_tokens)
        wishes = self._scaler.decide(loads, now)
        for needs in (self._kept, self._needs):
            needs.update(wishes, now)
        total = self._size(wishes, target, running, now)
        prefill = self._split(len(members))
        if len(members) >= total and not waits:
            self._prefill = prefill
        of_all = self._split(total)
        counts: dict[Role, int] = {"prefill": of_all, "decode": total - of_all}
        decisions = {role: replace(wish, replicas=counts[role]) for role, wish in wishes.items()}
        for role, wish in decisions.items():
            if counts[role] < min(self._needs.of[role], loads[role].target_replicas):
                decisions[role] = replace(wish, reason="roles")
        roles = {name: member.role for name, member in members.items()} if waits else _assign(members, prefill)
        return RoleDecision(total, roles, decisions)

    def _waits_for_reports(self, reported: int, running: int, now: float) -> bool:
        """Return whether to change no role yet, because a replica that is up has not reported its own yet."""
        if reported >= running or self._complete_at < 0:
            self._complete_at = now
        return reported < running and now - self._complete_at < REPORT_S

    def _load(self, role: Role, members: Mapping[str, Member]) -> PoolLoad:
        loads = [member.load for member in members.values() if member.role == role]
        # those whose prompts are computed elsewhere need no slot before the other role has caught up
        loads = [replace(load, running=load.running - load.receiving) for load in loads]
        return PoolLoad(target_replicas=len(loads), running_replicas=len(loads), replicas=loads)

    def _size(self, wishes: Mapping[Role, ScalingDecision], target: int, running: int, now: float) -> int:
        """Return how many replicas there should be."""
        low, high = self._settings.min_total, self._settings.max_total
        needed = sum(self._needs.of.values())
        stable = self._total.stabilize(needed, target, now)
        if all(wish.reason == "idle" for wish in wishes.values()):
            stable = 0
        elif not target:
            stable = max(1, needed)
        return min(max(min(stable, max(target, MAX_GROWTH * running, 1)), low), high)

    def _split(self, replicas: int) -> int:
        """Return how many of this number of replicas should compute prompts."""
        for needs in (self._kept, self._needs):
            decode, prefill = max(1, needs.of["decode"]), needs.of["prefill"]  # one always answers
            if replicas >= decode + prefill:
                return min(max(self._prefill, prefill), replicas - decode)
        most = max(0, replicas - max(1, self._limits["decode"].min_replicas))
        least = min(self._limits["prefill"].min_replicas, most)

        def pressure(count: int) -> float:
            of_prefill = self._scaler.pressure("prefill", count)
            return max(of_prefill, self._scaler.pressure("decode", replicas - count))

        now = min(max(self._prefill, least), most)
        best = min(range(least, most + 1), key=pressure)
        return best if pressure(best) < WORTH * pressure(now) else now


def _assign(members: Mapping[str, Member], prefill: int) -> dict[str, Role]:
    """Return the role of each replica, such that `prefill` of them compute prompts and as few as possible change roles.
    The replicas with the least work change."""
    roles: dict[str, Role] = {name: member.role for name, member in members.items()}

    def work(name: str) -> tuple[int, int, str]:
        load = members[name].load
        return load.running + load.waiting, load.queued_tokens, name

    more = prefill - sum(role == "prefill" for role in roles.values())
    old, new = ROLES if more > 0 else ROLES[::-1]
    free = sorted((name for name, role in roles.items() if role == old), key=work)
    roles.update(dict.fromkeys(free[: abs(more)], new))
    return roles
