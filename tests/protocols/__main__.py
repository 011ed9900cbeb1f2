"""python -m tests.protocols [WORD ...] [--most N]: explore the scopes with such a word in their names, and print how
many states they have."""

from __future__ import annotations

import argparse
import sys
import time

from tests.protocols.explorer import Explorer, Violation
from tests.protocols.scopes import SCOPES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocols", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--most", type=int, default=200_000, help="states of a scope")
    args = parser.parse_args()
    bad = 0
    for name, scope in SCOPES.items():
        if any(word in name for word in args.words or [""]):
            began = time.process_time()
            try:
                told = str(Explorer(scope).explore(args.most))
            except Violation as violation:
                bad, told = bad + 1, str(violation)
            print(f"{name}: {told} cpu_s={time.process_time() - began:.1f}", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
