"""Small changes of a day, each from a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from tests.days.day import OPTIONS, PARTS, THEMES, Ask, Day, Fault, drawn, fault_of
from tests.days.strike import MOMENTS

NEAR_S = 0.5  # by how much a fault moves, mostly
OF_AUTOSCALER = ("scale", "switch role")


def _with(day: Day, *faults: Fault) -> Day:
    """Return the day with these faults, but for those of its replicas' numbers and roles if the autoscaler decides
    these."""
    return replace(day, faults=tuple(each for each in faults if not (day.scales and each.kind in OF_AUTOSCALER)))


def add_fault(day: Day, rng: random.Random) -> Day:
    kinds = rng.choice(THEMES)
    return _with(day, *day.faults, fault_of(rng, day.asks, kinds, day.size)) if day.asks else day


def drop_fault(day: Day, rng: random.Random) -> Day:
    dropped = rng.randrange(len(day.faults) + 1)
    return replace(day, faults=day.faults[:dropped] + day.faults[dropped + 1 :])


def change_fault(day: Day, rng: random.Random) -> Day:
    """Let a fault strike at another time or moment, elsewhere, or for longer."""
    if not day.faults:
        return add_fault(day, rng)
    index = rng.randrange(len(day.faults))
    fault = day.faults[index]
    match rng.randrange(5):
        case 0:
            fault = replace(fault, at=max(0.0, fault.at + rng.uniform(-NEAR_S, NEAR_S)))
        case 1:
            fault = replace(fault, at=rng.choice(day.faults).at + rng.uniform(0, NEAR_S))
        case 2:
            fault = replace(fault, number=rng.randrange(100), other=rng.randrange(100))
        case 3:
            fault = replace(fault, seconds=fault.seconds * rng.uniform(0.3, 2.0))
        case 4:
            fault = replace(fault, moment=rng.choice(["", *MOMENTS.get(fault.kind, ())]))
    return replace(day, faults=(*day.faults[:index], fault, *day.faults[index + 1 :]))


def repeat_fault(day: Day, rng: random.Random) -> Day:
    """Let a fault strike once more, soon afterwards."""
    if not day.faults:
        return add_fault(day, rng)
    fault = rng.choice(day.faults)
    again = replace(fault, at=fault.at + rng.uniform(0, NEAR_S), other=rng.randrange(100))
    return replace(day, faults=(*day.faults, again))


def change_option(day: Day, rng: random.Random) -> Day:
    """Change one option of the cluster, unless a part of the day depends on it."""
    name = rng.choice(list(OPTIONS))
    value = drawn(rng, name)
    pools = name in ("ingresses", "decode", "prefill") and (day.scales or day.size.roles)
    steps = name in ("max_num_seqs", "max_num_batched_tokens") and (day.scales or day.size.images is not None)
    return day if pools or steps else replace(day, size=replace(day.size, **{name: value}))


def change_network(day: Day, rng: random.Random) -> Day:
    return replace(
        day,
        loss=rng.choice([0.0, 0.02, 0.3]),
        repeats=rng.choice([0.0, 0.05, 0.3]),
        late_s=rng.choice([0.01, 1.0]),
        late=rng.choice([0.01, 0.2]),
        busy=rng.choice([0.0, 0.2]),
    )


def change_chance(day: Day, rng: random.Random) -> Day:
    """Let everything else that happens by chance be otherwise."""
    return replace(day, seed=rng.getrandbits(32))


def change_ask(day: Day, rng: random.Random) -> Day:
    """Let a client ask at another time, or leave at another."""
    if not day.asks:
        return day
    index = rng.randrange(len(day.asks))
    ask = day.asks[index]
    match rng.randrange(3):
        case 0:
            ask = replace(ask, at=rng.choice(day.asks).at + rng.uniform(0, 0.1))
        case 1:
            ask = replace(ask, leaves_after=rng.uniform(0, 40 * day.size.step_s))
        case 2:
            ask = replace(ask, slow_s=rng.choice([0.0, 0.2]))
    return replace(day, asks=(*day.asks[:index], ask, *day.asks[index + 1 :]))


def splice(day: Day, rng: random.Random) -> Day:
    """Add the faults of another day, and most often its requests."""
    other = Day.of(rng.randrange(10**6))
    day = _with(day, *day.faults, *other.faults)
    understood = other.size.images is None and bool(other.size.adapters) <= bool(day.size.adapters)
    if not understood or rng.random() < 0.4:
        return day
    mark = "s"
    while any(ask.requests[0].request_id.startswith(mark) for ask in day.asks):
        mark += "s"
    return replace(day, asks=(*day.asks, *(_renamed(ask, mark) for ask in other.asks)))


def _renamed(ask: Ask, mark: str) -> Ask:
    requests = tuple(structs.replace(each, request_id=f"{mark}{each.request_id}") for each in ask.requests)
    return replace(ask, requests=requests, key=f"k{mark}{ask.key[1:]}" if ask.key else "", api_key="")


def add_part(day: Day, rng: random.Random) -> Day:
    """Add a part that the day may have by chance."""
    for _ in range(8):
        part = rng.choice(PARTS)
        more = part.add(day, rng)
        kinds = [type(plan) for plan in more.parts]
        if len(set(kinds)) == len(kinds) > len(day.parts):
            return more
    return day


CHANGES: dict[str, Callable[[Day, random.Random], Day]] = {
    change.__name__: change
    for change in (
        add_fault, drop_fault, change_fault, repeat_fault, change_option, change_network, change_chance, change_ask,
        splice, add_part,
    )
}  # fmt: skip
