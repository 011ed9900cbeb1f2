"""python -m tests.days SEED...: live through these days, and print the log of those that end badly, made smaller. A day
of the corpus, or one that a search has found, is the JSON that names it.
python -m tests.days --from 0 --count 1000: as many days.
python -m tests.days --guided --for SECONDS --processes N: search for days that reach what no other has."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.days.day import Day
from tests.days.guided import RECIPE, Recipe, Search, corpus, smaller
from tests.days.world import Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.days", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("days", nargs="*", type=lambda text: RECIPE.decode(text) if "{" in text else Recipe(int(text)))
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="print the log of good days too")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--for", dest="seconds", type=float, default=60.0, help="seconds of a search")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fresh", type=float, default=0.2, help="share of new seeds; with 1 nothing guides the search")
    parser.add_argument("--keep", type=Path, help="file into which the days are written that reach most")
    parser.add_argument("--most", type=int, default=150, help="days in that file")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what was imported lives for ever
    return guided(args) if args.guided else each(args)


def each(args: argparse.Namespace) -> int:
    recipes = args.days or [Recipe(seed) for seed in range(args.first, args.first + args.count)]
    seen, seconds, steps, began, bad = Counter[str](), 0.0, 0, time.process_time(), 0
    for recipe in recipes:
        outcome = run(recipe.day())
        seen += outcome.seen
        seconds, steps = seconds + outcome.seconds, steps + outcome.steps
        if outcome.error is not None:
            bad += 1
            print(f"{recipe if recipe.changes else f'seed {recipe.seed}'}: {outcome.kind}", flush=True)
            if args.days:
                show(*((recipe.day(), outcome) if args.no_shrink else smaller(recipe, outcome.kind)))
        elif args.log:
            print("\n".join(outcome.log))
    took = time.process_time() - began
    for name, count in sorted(seen.items()):
        print(f"{count:9d} {name}")
    print(f"days={len(recipes)} bad={bad} simulated_s={seconds:.0f} steps={steps} kinds={len(seen)} cpu_s={took:.1f} "
          f"days_per_core_hour={3600 * len(recipes) / took:.0f} "
          f"simulated_s_per_cpu_s={seconds / took:.0f}")  # fmt: skip
    return bad > 0


def guided(args: argparse.Namespace) -> int:
    search = Search(random.Random(), args.fresh)
    search.run(corpus() if args.fresh < 1 else [], args.seconds, args.processes)
    print(search, flush=True)
    if args.keep is not None:
        args.keep.write_text("".join(f"{recipe}\n" for recipe in search.smallest(args.most)))
    for kind, recipe in search.bad.items():
        print(f"{kind}\n{recipe}")
        if not args.no_shrink:
            show(*smaller(recipe, kind))
    return bool(search.bad)


def show(day: Day, outcome: Outcome) -> None:
    print("\n".join(outcome.log))
    print(day.size)
    for part in (*day.asks, *day.faults, *day.parts):
        print(part)
    traceback.print_exception(outcome.error)


if __name__ == "__main__":
    sys.exit(main())
