"""What is explored. Each scope is about one kind of handoff; the last one has all of them at once, and is bounded."""

from __future__ import annotations

from tests.protocols.process import Fetch, Move, Prompt, Scope


def limits(**counts: int) -> tuple[tuple[str, int], ...]:
    return tuple((name.replace("_", " "), count) for name, count in counts.items())


TWO, ONE = Prompt("d0", ("p0",)), Prompt("d0", ("p0",), num_blocks=1)
ALL = limits(tick=2, sleep=1, die=1, cancel=1, refuse=1, read_fails=1, call_fails=1, lose=1)

# whole, in every `make test`
QUICK = {
    "a prompt": Scope(("d0", "p0"), (ONE,), limits(sleep=1)),
    "a request that two engines claim": Scope(("d0", "d1", "p0"), (Move("p0", ("d0", "d1"), num_blocks=1),), limits()),
}
LARGE = {
    "a prompt that is cancelled": Scope(("d0", "p0"), (ONE,), limits(cancel=1)),
    "a prompt that is accepted again": Scope(("d0", "p0"), (ONE,), limits(sleep=1), accepts=2),
    "a prompt, and time": Scope(("d0", "p0"), (ONE,), limits(tick=1)),
    "a prompt, two prefill engines": Scope(
        ("d0", "p0", "p1"), (Prompt("d0", ("p0", "p1"), num_blocks=1),), limits(sleep=1)
    ),
    "a prompt of two blocks": Scope(("d0", "p0"), (TWO,), limits(sleep=1)),
    "blocks are fetched": Scope(("d0", "d1"), (Fetch("d0", "d1"),), limits(sleep=1, lose=1)),
    "two prompts share the blocks": Scope(("d0", "p0"), (ONE, TWO), limits(sleep=1)),
    "two engines move to each other": Scope(
        ("d0", "d1"), (Move("d0", ("d1",), num_blocks=1), Move("d1", ("d0",), num_blocks=1)), limits(sleep=1, cancel=1)
    ),
    "a prompt, all faults": Scope(("d0", "p0"), (TWO,), ALL, accepts=2),
    "a request moves, all faults": Scope(("d0", "d1"), (Move("d0", ("d1",)),), ALL),
    "blocks are fetched, all faults": Scope(("d0", "d1"), (Fetch("d0", "d1"),), ALL),
    "everything at once": Scope(
        ("d0", "d1", "p0", "p1"),
        (Prompt("d0", ("p0", "p1")), Move("p0", ("d0", "d1")), Fetch("d1", "p1")),
        ALL,
    ),
}
SCOPES = {**QUICK, **LARGE}
