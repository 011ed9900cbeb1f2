"""A bad day: requests and faults from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import Prediction
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.days import adapters, autoscaler, batches, checks, encoders, holds, quotas, stills
from tests.days.cluster import Size
from tests.days.model import alone
from tests.days.part import Plan
from tests.days.strike import MOMENTS

PARTS = (encoders, quotas, batches, autoscaler, stills, adapters, holds, checks)
FEW = 0.05  # share of datagrams that may be lost without anybody noticing, since each is repeated some five times
# what goes wrong on one day: some days have one kind of trouble, and much of it
THEMES = (
    ("kill engine", "kill replica", "kill node", "pause", "cut", "lose tokens", "lose updates", "datagrams", "move",
     "drain", "reset cache"),
    ("pause",),
    ("pause", "pause", "reset cache", "kill node"),
    ("kill engine", "kill replica", "kill node", "lose tokens"),
    ("cut", "datagrams", "lose updates", "pause"),
    ("move", "move", "drain", "pause", "kill node"),
    ("move", "move", "move", "move", "reset cache"),
    ("freeze", "freeze", "pause", "datagrams"),
    ("lose updates", "lose updates", "slow answers", "slow answers", "freeze"),
    ("reset cache", "reset cache", "move", "freeze"),
    ("switch role", "switch role", "switch role", "move", "pause", "kill node"),
    ("kill ingress", "kill ingress", "kill engine", "move"),
    ("kill ingress", "store away", "store away", "kill node"),
    ("scale", "scale", "move", "kill node", "pause"),
    ("suspend",),
    ("suspend", "suspend", "move", "kill replica"),
)  # fmt: skip

OWN_WILL = ("move", "reset cache", "switch role", "release holds", "flip")  # nothing is lost

# what clusters are made of: the values of each field of Size, or the share of the days that have it
OPTIONS: dict[str, Sequence[Any] | float] = {
    "ingresses": [1, 2, 2],
    "decode": [1, 2, 2, 3],
    "prefill": [0, 1, 1, 2],
    "num_blocks": [24, 24, 28, 40, 96],
    "max_num_seqs": [2, 4, 6],
    "max_num_batched_tokens": [8, 24, 64],
    "overlap": 0.7,
    "policy": ["always", "always", "auto"],
    "fetches": 0.6,
    "drift": [0.0, 0.001, 0.2],
    "routing": ["prefix_aware", "prefix_aware", "power_of_two", "round_robin"],
    "max_waiting": [8, 64],
    "step_s": [0.004, 0.02, 0.06],
    "stages": [1, 1, 2, 3],
    "drafts": 0.4,
    "lease_s": [10.0, 1.0, 0.3],
    "block_s": [0.0005, 0.004, 0.03],
    "stalls": [0.01, 0.01, 0.2],
    "host": [0, 0, 0, 6, 30],
    "disk": [0, 0, 0, 20, 200],
    "tier_ttl_s": [None, None, 3.0],
}


@dataclass(frozen=True)
class Ask:
    """What a client asks for. leaves_after: seconds; None if it waits for the end. slow_s: between two looks. key: the
    idempotency key, with which it connects again after it has left."""

    at: float
    ingress: int
    client: str
    requests: tuple[GenerateRequest, ...]
    leaves_after: float | None = None
    slow_s: float = 0.0
    key: str = ""
    api_key: str = ""


@dataclass(frozen=True)
class Fault:
    """number: says which engine, or two of them. seconds: how long. moment: what the engine must be at."""

    at: float
    kind: str
    number: int
    other: int
    seconds: float
    moment: str = ""


@dataclass(frozen=True)
class Day:
    seed: int
    size: Size
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    loss: float = 0.0
    repeats: float = 0.0
    late_s: float = 1.0
    late: float = 0.01
    busy: float = 0.0
    parts: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, seed: int) -> Day:
        rng = random.Random(seed)
        mood, kinds = rng.random(), rng.choice(THEMES)
        size = Size(**{name: drawn(rng, name) for name in OPTIONS})
        if (size.host or size.disk) and rng.random() < 0.7:  # blocks are evicted, and quicker to load than to compute
            size = replace(size, num_blocks=24, block_s=min(size.block_s, 0.004), step_s=max(size.step_s, 0.02))
        if size.prefill and rng.random() < 0.2:
            size = replace(size, roles=True)
        if "suspend" in kinds:  # it matters while reads outlive leases
            lease_s = rng.choice([1.0, 0.3])
            size = replace(size, prefill=size.prefill or 1, policy="always", lease_s=lease_s, block_s=0.03, stalls=0.2)
        length_s = rng.choice([2.0, 6.0, 15.0])
        longest = rng.choice([40, 60])
        prefixes = [tuple(rng.randrange(1, 64) for _ in range(rng.randrange(0, longest))) for _ in range(3)]
        asks = tuple(_ask(rng, i, length_s, prefixes, size) for i in range(rng.choice([6, 15, 30])))
        if "kill ingress" in kinds:
            asks = tuple(other for ask in asks for other in _keyed(rng, ask))
        calm, lossy = mood < 0.15, 0.15 <= mood < 0.3
        if lossy:
            kinds = ("move", "move", "move", "reset cache", "switch role")
        count = 0 if calm else rng.choice([12, 24]) if lossy else rng.choice([2, 6, 12])
        faults = tuple(fault_of(rng, asks, kinds, size) for _ in range(count))
        loss, repeats = rng.choice([0.0, 0.0, 0.02, 0.3]), rng.choice([0.0, 0.05, 0.3])
        if calm:
            return cls(seed, size, asks, (), 0.0, repeats, 0.01)._with_parts()
        busy = rng.choice([0.0, 0.0, 0.2])
        if lossy:
            return cls(seed, size, asks, faults, FEW, repeats, 0.01, busy=busy)._with_parts()
        late_s, late = rng.choice([0.01, 1.0]), rng.choice([0.01, 0.2])
        return cls(seed, size, asks, faults, loss, repeats, late_s, late, busy)._with_parts()

    def _with_parts(self) -> Day:
        """Return the day with the parts that its seed gives it. Whatever they are, the rest of the day is the same."""
        day = self
        for part in PARTS:
            day = part.add(day, random.Random(f"{self.seed} {part.__name__}"))
        return day

    @property
    def is_calm(self) -> bool:
        """Whether nothing is lost and nothing is late."""
        return not (self.faults or self.loss or self.busy) and self.late_s < self.size.lease_s / 20

    @property
    def scales(self) -> bool:
        """Whether the autoscaler ends replicas, which may be about to release what they have read."""
        return any(isinstance(plan, autoscaler.Scaling) for plan in self.parts)

    @property
    def only_losses(self) -> bool:
        """Whether nothing is wrong but a few lost messages, all of which are sent again."""
        own_will = all(fault.kind in OWN_WILL for fault in self.faults)
        own_will &= not self.scales
        return own_will and 0 < self.loss <= FEW and self.late_s < self.size.lease_s / 20

    @property
    def stands_still(self) -> bool:
        """Whether ingresses stand still on this day."""
        return any(isinstance(plan, stills.Stills) for plan in self.parts)

    @property
    def still_s(self) -> float:
        """For how long ingresses stand still, in all."""
        return sum(fault.seconds for fault in self.faults if fault.kind == "stand still")

    @property
    def last_at(self) -> float:
        return max([0.0, *(a.at for a in self.asks), *(f.at + f.seconds for f in self.faults)])


def drawn(rng: random.Random, option: str) -> Any:
    """Return a value of one of the OPTIONS."""
    values = OPTIONS[option]
    return rng.random() < values if isinstance(values, float) else rng.choice(values)


def fault_of(rng: random.Random, asks: tuple[Ask, ...], kinds: tuple[str, ...], size: Size) -> Fault:
    kind = rng.choice(kinds)
    lease_s = rng.uniform(0.5, 3.0) * size.lease_s  # some faults just outlive a lease
    seconds = rng.choice([rng.uniform(0, 1), rng.uniform(0, 6), rng.uniform(0, 16), min(16.0, lease_s)])
    return Fault(
        rng.choice(asks).at + rng.uniform(0, 80 * size.step_s),
        kind,
        rng.randrange(100),
        rng.randrange(100),
        lease_s if kind == "suspend" else seconds,
        rng.choice(["", *MOMENTS.get(kind, ())]),
    )


def _ask(rng: random.Random, number: int, length_s: float, prefixes: list[tuple[int, ...]], size: Size) -> Ask:
    prompt = [rng.randrange(1, 64) for _ in range(rng.randrange(1, 16))]
    if rng.random() < (0.9 if size.host or size.disk else 0.6):
        prompt = [*rng.choice(prefixes), *prompt]
    elif rng.random() < 0.6:
        prompt += [rng.randrange(1, 64) for _ in range(36)]
    timeout_s = rng.choice([None, 30.0, 30.0, 60.0, rng.uniform(0.05, 3.0)])
    params = SamplingParams(
        max_tokens=rng.choice([1, 3, 12, 30, 40]),
        ignore_eos=rng.random() < 0.7,
        seed=rng.choice([None, rng.randrange(-(2**63), 2**63)]),
        stop=rng.choice([[], [], ["ab"], ["q", "xyz"]]),
        stop_token_ids=rng.choice([[], [], [rng.randrange(64)]]),
        structured_outputs=StructuredOutputsParams(regex="of FakeGrammar") if rng.random() < 0.15 else None,
    )
    requests = tuple(
        _predicted(
            rng,
            size.max_model_len,
            GenerateRequest(
                request_id=f"r{number}{'ab'[i]}",
                prompt=prompt,
                params=params,
                timeout_s=timeout_s,
                cache_salt=rng.choice(["", "", "salt"]),
                session_id=rng.choice(["", "", "s1", "s2"]),
            ),
        )
        for i in range(rng.choice([1, 1, 1, 2]))
    )
    return Ask(
        at=rng.choice([rng.uniform(0.0, length_s), rng.uniform(0.0, 0.5)]),
        ingress=rng.randrange(size.ingresses),
        client=rng.choice("xyz"),
        requests=requests,
        leaves_after=rng.uniform(0.0, 60 * size.step_s) if rng.random() < 0.15 else None,
        slow_s=rng.choice([0.0, 0.0, 0.0, 0.2]),
    )


def _keyed(rng: random.Random, ask: Ask) -> list[Ask]:
    """Give most requests an idempotency key, and send some of them twice."""
    if rng.random() < 0.3:
        return [ask]
    requests = tuple(
        msgspec.structs.replace(request, timeout_s=None if request.timeout_s is None else 60.0)
        for request in ask.requests
    )
    leaves_after = rng.choice([None, rng.uniform(0.0, 2.0)])
    first = replace(ask, requests=requests, key=f"k{requests[0].request_id}", leaves_after=leaves_after, slow_s=0.0)
    if rng.random() < 0.5:
        return [first]
    late_s = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 5)])
    return [first, replace(first, at=ask.at + late_s, ingress=ask.ingress + 1, client="w")]


def _predicted(rng: random.Random, max_model_len: int, request: GenerateRequest) -> GenerateRequest:
    """Give some requests a prediction of their output, from which tokens are drafted."""
    if rng.random() < 0.6:
        return request
    wrong = rng.choice([0.0, 0.1, 0.5])
    tokens = alone(request, max_model_len)[0]
    prediction = [rng.randrange(64) if rng.random() < wrong else token for token in tokens]
    return request.asking(Prediction(prediction))


def shrink(day: Day, fails: Callable[[Day], bool], tries: int = 60) -> Day:
    """Return a smaller day on which the same is wrong."""
    for name in ("faults", "asks", "parts"):
        step = max(1, len(getattr(day, name)) // 2)
        while tries > 0:
            start, smaller = 0, False
            while start < len(getattr(day, name)) and tries > 0:
                parts = getattr(day, name)
                candidate = replace(day, **{name: parts[:start] + parts[start + step :]})
                tries -= 1
                if fails(candidate):
                    day, smaller = candidate, True
                else:
                    start += step
            if step == 1 and not smaller:
                break
            step = max(1, step // 2)
    return day
