"""Runs all pairs, prints those that are not equal, and writes docs/composition.md if each has a place there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.composition.page import PAGE, Cell, render
from tests.composition.pairs import Outcome, Pairs
from tests.composition.parts import PARTS


def main(names: list[str]) -> None:
    """names: of parts whose pairs alone are run; nothing is written then."""
    torch.set_num_threads(1)
    found: dict[Cell, Outcome] = {}
    with tempfile.TemporaryDirectory() as root:
        pairs, started = Pairs(Path(root)), time.monotonic()
        try:
            for i, first in enumerate(PARTS):
                for second in PARTS[i:]:
                    if names and not {first.name, second.name} & set(names):
                        continue
                    began = time.monotonic()
                    outcome = found[second.name, first.name] = pairs.run(first, second)
                    seconds = time.monotonic() - began
                    if outcome.kind != "equal" or seconds > 2:
                        print(f"{seconds:5.2f} s {first.name} x {second.name}: {outcome}", flush=True)
                pairs.end_engines()
        finally:
            pairs.close()
        cpu_s = sum(os.times()[:4])
        print(f"{len(found)} pairs in {time.monotonic() - started:.0f} s, {cpu_s:.0f} s of CPU time")
    if not names and all(outcome.has_place for outcome in found.values()):
        PAGE.write_text(render(PARTS, found))


if __name__ == "__main__":
    main(sys.argv[1:])
