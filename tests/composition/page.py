"""docs/composition.md: written from what the pairs gave, and read again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.composition.pairs import Outcome
from tests.composition.parts import Part

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"
COMMAND = "python -m tests.composition"
Cell = tuple[str, str]
"""The names of a row and of a column before it, or of the same."""
INTRODUCTION = """\
# What goes together

Whatever an engine or a request can turn on is a row of the first table. A cell of the second table is a pair of them,
which a test has run in one engine with a tiny model on the CPU (`tests/composition/`): a batch of requests with
neither part, one of them, the other, and both, and perhaps a second batch that continues the prompts. Each request must
have the tokens, the end and the log-probabilities, bit for bit, that it has alone in an engine with neither cache nor
drafts, tiers or other parts that only save time. Then the engine's books must balance.

| cell | meaning |
| --- | --- |
| `=` | equal |
| `x` and a number | exclusive: the two are two values of one thing |
| `r` and a number | refused, with a typed error that names its reason |

There are no other cells: a pair that gives other bits, or is refused without a reason, fails the test. `make test`
runs two pairs of each part, others each day, and `make test-all` runs all of them. `{command}` runs all and writes this
page.

Where [determinism.md](determinism.md) promises no equal bits, two things are left out. One is `torch_compile`: to
compile a tiny model takes half a minute of CPU time. The other is a router that transformers' own code multiplies
(dots.llm1, Granite 3 MoE): a step of one token has other bits. The model here has a linear layer, which Manta replaces.
"""
ROW = re.compile(r"^\| (\d+) \| ([^|]+?) \|(.*)\|$", re.MULTILINE)
NOTE = re.compile(r"^- `([xr]\d+)`: (.+)$", re.MULTILINE)
KINDS = {"x": "exclusive", "r": "refused"}


def render(parts: Sequence[Part], found: Mapping[Cell, Outcome]) -> str:
    """Return the page. found: an outcome for each cell on and below the diagonal."""
    notes: dict[tuple[str, str], str] = {}
    rows = []
    for i, part in enumerate(parts):
        cells = [_cell(found[part.name, other.name], notes) for other in parts[: i + 1]]
        rows.append(f"| {i + 1} | {part.name} | {' | '.join(cells + [''] * (len(parts) - i - 1)).rstrip()} |")
    counts = Counter(outcome.kind for (row, column), outcome in found.items() if row != column)
    total = ", ".join(f"{counts[kind]} {kind}" for kind in ("equal", "refused", "exclusive"))
    return "\n".join(
        [
            INTRODUCTION.format(command=COMMAND),
            "## Parts\n",
            "| | part | how it is turned on |\n| --- | --- | --- |",
            *(f"| {i + 1} | {part.name} | {part.how} |" for i, part in enumerate(parts)),
            f"\n## Pairs\n\n{sum(counts.values())} pairs: {total}.\n",
            f"| | | {' | '.join(str(i + 1) for i in range(len(parts)))} |",
            f"| --- | --- | {' | '.join(['---'] * len(parts))} |",
            *rows,
            "\n## Reasons\n",
            *(f"- `{name}`: {reason}" for (_, reason), name in sorted(notes.items(), key=lambda note: _order(note[1]))),
            "",
        ]
    )


def read(text: str) -> dict[Cell, Outcome]:
    """Return the cells of the page."""
    notes = dict(NOTE.findall(text))
    rows = ROW.findall(text.partition("\n## Pairs\n")[2])
    names = [name for _, name, _ in rows]
    found = {}
    for i, (_, name, cells) in enumerate(rows):
        for other, cell in zip(names[: i + 1], cells.split("|"), strict=False):
            text = cell.strip()
            found[name, other] = Outcome("equal") if text == "=" else Outcome(KINDS[text[0]], notes[text])
    return found


def _cell(outcome: Outcome, notes: dict[tuple[str, str], str]) -> str:
    if outcome.kind == "equal":
        return "="
    letter = next(letter for letter, kind in KINDS.items() if kind == outcome.kind)
    number = 1 + sum(kind == outcome.kind for kind, _ in notes)
    return notes.setdefault((outcome.kind, outcome.reason), f"{letter}{number}")


def _order(note: str) -> tuple[str, int]:
    return note[0], int(note[1:])
