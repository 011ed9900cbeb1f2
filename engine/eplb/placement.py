"""Chooses which experts of a layer each rank holds, by their load. Pure: neither torch nor clock.

The method is that of DeepSeek's expert parallel load balancer (without its hierarchy of nodes). First, experts get
copies: each redundant one goes to the expert whose copies have the highest load. Then the copies are distributed, the
heaviest first, each to the least loaded rank that has room.

A placement is a list of the expert in each slot of each rank, EMPTY in a slot without one. A rank holds an expert at
most once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

Placement = list[list[int]]
Load = Sequence[float]
"""Tokens of each expert of a layer."""

EMPTY = -1
LEAST_GAIN = 0.05
"""Experts stay where they are unless the most loaded rank has at least this fraction less load afterwards."""


class Move(NamedTuple):
    """A copy of an expert's weights from one slot to another, which may be on the same rank."""

    expert: int
    source: int
    """Rank that sends."""
    source_slot: int
    target: int
    target_slot: int


def first_placement(num_experts: int, ranks: int, slots: int) -> Placement:
    """Return the placement of an engine that starts: each rank has neighbours, and then empty slots."""
    held = (range(num_experts * rank // ranks, num_experts * (rank + 1) // ranks) for rank in range(ranks))
    return [[*own, *[EMPTY] * (slots - len(own))] for own in held]


def balance(load: Load, current: Placement) -> Placement:
    """Return a placement that fits the load, with as few moves from the current one as can be found quickly. Returns
    the current one if another would gain little.

    An expert has at most one copy on each rank. Raises ValueError if there is no room for every expert.
    """
    ranks, slots = len(current), len(current[0])
    if not len(load) <= ranks * slots <= len(load) * ranks:
        raise ValueError(f"{len(load)} experts do not fill {ranks} x {slots} slots")
    copies = count_copies(load, ranks, slots)
    packs = pack([amount / count for amount, count in zip(load, copies, strict=True)], copies, ranks, slots)
    found = keep_places(packs, current)
    gains = max(rank_loads(load, found)) < (1 - LEAST_GAIN) * max(rank_loads(load, current))
    return found if gains else current


def count_copies(load: Load, ranks: int, slots: int) -> list[int]:
    """Return the number of copies of each expert: the slots of all ranks together, at most one per rank each."""
    copies = [1] * len(load)
    heaviest = [(-amount, expert) for expert, amount in enumerate(load)]
    heapq.heapify(heaviest)
    for _ in range(ranks * slots - len(load)):
        _, expert = heapq.heappop(heaviest)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heaviest, (-load[expert] / copies[expert], expert))
    return copies


def pack(shares: Load, copies: Sequence[int], ranks: int, slots: int) -> list[set[int]]:
    """Return the experts of each of `ranks` packs. shares: load of each copy of an expert."""
    packs: list[set[int]] = [set() for _ in range(ranks)]
    loads = [0.0] * ranks
    for expert in sorted(range(len(shares)), key=lambda expert: -shares[expert]):
        for _ in range(copies[expert]):
            without = [rank for rank in range(ranks) if expert not in packs[rank]]
            free = [rank for rank in without if len(packs[rank]) < slots]
            if not free:  # only packs that have it have room: one of them takes another expert of a full pack
                free = [max(without, key=lambda rank: loads[rank])]
                room = next(rank for rank in range(ranks) if len(packs[rank]) < slots)
                moved = min(packs[free[0]] - packs[room], key=lambda other: (shares[other], other))
                packs[free[0]].remove(moved)
                packs[room].add(moved)
                loads[free[0]] -= shares[moved]
                loads[room] += shares[moved]
            rank = min(free, key=lambda rank: loads[rank])
            packs[rank].add(expert)
            loads[rank] += shares[expert]
    return packs


def keep_places(packs: list[set[int]], current: Placement) -> Placement:
    """Give each pack to a rank, preferably to one that holds most of it, and keep experts in their slots."""
    ranks = range(len(packs))
    common = sorted(
        ((len(packs[pack].intersection(current[rank])), pack, rank) for pack in ranks for rank in ranks),
        key=lambda found: (-found[0], *found[1:]),
    )
    pack_of: dict[int, int] = {}
    for _, pack, rank in common:
        if rank not in pack_of and pack not in pack_of.values():
            pack_of[rank] = pack
    placement = []
    for rank in ranks:
        wanted = packs[pack_of[rank]]
        arriving = iter(sorted(wanted.difference(current[rank])))
        placement.append([expert if expert in wanted else next(arriving, EMPTY) for expert in current[rank]])
    return placement


def rank_loads(load: Load, placement: Placement) -> list[float]:
    """Return the load of each rank, if the copies of an expert share its tokens equally."""
    copies = [0] * len(load)
    for held in placement:
        for expert in held:
            if expert != EMPTY:
                copies[expert] += 1
    return [sum(load[expert] / copies[expert] for expert in held if expert != EMPTY) for held in placement]


def find_moves(current: Placement, wanted: Placement) -> list[Move]:
    """Return the copies that lead from one placement to another. Of several ranks that hold an expert, one that sends
    little sends it; a rank that holds it already sends it to itself."""
    held = {(rank, expert): slot for rank, experts in enumerate(current) for slot, expert in enumerate(experts)}
    sent = [0] * len(current)
    moves = []
    for target, experts in enumerate(wanted):
        for slot, expert in enumerate(experts):
            if expert in (EMPTY, current[target][slot]):
                continue
            sources = [rank for rank in range(len(current)) if (rank, expert) in held]
            source = target if target in sources else min(sources, key=lambda rank: sent[rank])
            sent[source] += source != target
            moves.append(Move(expert, source, held[source, expert], target, slot))
    return moves


def balancedness(loads: Sequence[Sequence[float]]) -> float:
    """Return the mean load of a rank divided by the maximum, over all layers together, as vLLM does: 1 if the ranks of
    each layer have equal loads. loads: of each rank, for each layer."""
    most = sum(max(ranks) for ranks in loads)
    return sum(sum(ranks) / len(ranks) for ranks in loads) / most if most else 1.0
