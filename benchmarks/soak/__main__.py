"""A server with both pools for an hour, its requests left and its processes killed: `make soak`.

Two prefill replicas, two decode replicas of two ranks, two ingresses behind HAProxy, with an adapter, holds, tiers in
host memory and on disk, and a key with limits. Clients ask in eleven ways, as agents and in batches too, leave two in
eleven answers, and compare every text with the one that the request got before anything was killed. Every so often a
process gets SIGKILL, always the youngest of its kind, so that one of each lives for the whole run under all that is
asked, or the configuration changes, and the ingresses are replaced one by one. Memory, descriptors and threads of each
kind, processes, blocks, temporary files, shared memory, and what the same requests are billed are compared at rest:
after a while of requests only, and at the end. It exits with 1 if anything has grown, or a client was wronged.

With `--switch-roles`, replicas of one rank change between the pools instead.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from benchmarks.soak.footprint import Footprint
from benchmarks.soak.soak import FREE_KINDS, Soak, soak


def show_soak(found: Soak) -> None:
    visits, load = found.visits, [round(load, 1) for load in found.load]
    print(f"{found.seconds / 60:.1f} minutes; load of the machine {min(load)} to {max(load)}")
    print(f"killed: {_list(found.kills)}")
    print(f"answered: {_list(visits.answered)}")
    print(f"left by their clients: {_list(visits.left)}")
    print(f"refused: {_list(visits.refused)}")
    broken = Counter({struck: len(errors) for struck, errors in visits.broken.items()})
    print(f"broken, and asked again, by what was killed last: {_list(broken)}")
    print(f"files: {len(found.before.files)}, {len(found.after.files)}")
    print(f"files of shared memory: {len(found.before.shared_memory)}, {len(found.after.shared_memory)}")
    print(f"blocks and requests held at the end: {found.held:g}")
    for name, before in found.bills[0].answers.items():
        after = found.bills[1]
        print(f"{name} of the same requests: {before:g}, {after.answers[name]:g}; in the books {after.books[name]:g}")
    print()
    print("| at rest, before and after | processes | MiB of the largest | peak | MiB/h, second half | descriptors "
          "| threads |\n" + 7 * "| --- " + "|")  # fmt: skip
    for kind in sorted(found.before.counts() | found.after.counts()):
        if kind not in FREE_KINDS:
            peak = max((one.rss_mib for sample in found.samples for one in sample.of(kind)), default=0.0)
            slope = found.mib_per_hour(kind)
            cells = [
                kind,
                f"{len(found.before.of(kind))}, {len(found.after.of(kind))}",
                _pair(found, kind, "rss_mib"),
                f"{peak:.0f}",
                "-" if slope is None else f"{slope:.1f}",
                _pair(found, kind, "descriptors"),
                _pair(found, kind, "threads"),
            ]
            print("| " + " | ".join(cells) + " |")
    for problem in found.problems():
        print(f"\nPROBLEM: {problem}")


def _pair(found: Soak, kind: str, name: str) -> str:
    def largest(footprint: Footprint) -> str:
        return f"{max((getattr(one, name) for one in footprint.of(kind)), default=0):.0f}"

    return f"{largest(found.before)}, {largest(found.after)}"


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="With requests and kills.")] = 60.0,
    warm_up_minutes: Annotated[float, typer.Option(min=0.1, help="With requests only, before.")] = 2.0,
    kill_every_s: Annotated[float, typer.Option(min=1.0, help="Seconds from kill to kill.")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, help="Each asks again as soon as it has its answer.")] = 8,
    switch_roles: Annotated[bool, typer.Option(help="Replicas change between the pools.")] = False,
    log: Annotated[Path | None, typer.Option(help="Write the server's log into this file.")] = None,
) -> None:
    """Look for what grows while a server is used, left and killed."""
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            times = 60 * minutes, 60 * warm_up_minutes, kill_every_s
            found = asyncio.run(soak(Path(folder), *times, clients, switch_roles))
        finally:
            if log is not None and (server_log := Path(folder, "serve.log")).exists():
                shutil.copy(server_log, log)
    show_soak(found)
    if found.problems():
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
