"""python -m tests.days SEED...: live through these days, and print the log of those that end badly, made smaller.
python -m tests.days --from 0 --count 1000: as many days."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter

from tests.days.day import Day, shrink
from tests.days.world import Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.days", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="print the log of good days too")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what was imported lives for ever
    seeds = args.seeds or range(args.first, args.first + args.count)
    seen, seconds, steps, began, bad = Counter[str](), 0.0, 0, time.process_time(), 0
    for seed in seeds:
        outcome = run(Day.of(seed))
        seen += outcome.seen
        seconds, steps = seconds + outcome.seconds, steps + outcome.steps
        if outcome.error is not None:
            bad += 1
            print(f"seed {seed}: {outcome.kind}", flush=True)
            if args.seeds:
                show(Day.of(seed), outcome, not args.no_shrink)
        elif args.log:
            print("\n".join(outcome.log))
    took = time.process_time() - began
    for name, count in sorted(seen.items()):
        print(f"{count:9d} {name}")
    print(f"days={len(seeds)} bad={bad} simulated_s={seconds:.0f} steps={steps} kinds={len(seen)} cpu_s={took:.1f} "
          f"days_per_core_hour={3600 * len(seeds) / took:.0f} simulated_s_per_cpu_s={seconds / took:.0f}")  # fmt: skip
    return bad > 0


def show(day: Day, outcome: Outcome, small: bool) -> None:
    if small:
        day = shrink(day, lambda other: run(other).kind == outcome.kind)
        outcome = run(day)
    print("\n".join(outcome.log))
    print(day.size)
    for part in (*day.asks, *day.faults, *day.parts):
        print(part)
    traceback.print_exception(outcome.error)


if __name__ == "__main__":
    sys.exit(main())
