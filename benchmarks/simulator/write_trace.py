"""Writes synthetic traffic of `manta simulate --trace NAME` to a file, for other tools or for a look at it.

python -m benchmarks.simulator.write_trace --trace mooncake --requests 10000 --output trace.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.command import run
from cluster.lab.simulator.trace import PIECE, Trace, make_trace


def write(trace: Trace, path: Path) -> None:
    """Write JSON lines in Mooncake's format, which `Trace.read` takes."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(len(trace)):
            line = {
                "timestamp": round(1000 * float(trace.arrivals_s[i]), 3),
                "input_length": int(trace.prompt_tokens[i]),
                "output_length": int(trace.output_tokens[i]),
            }
            file.write(json.dumps(line | ({"hash_ids": trace.hash_ids[i]} if trace.hash_ids else {})) + "\n")


def reuse(trace: Trace) -> float:
    """Return the fraction of all prompt tokens that a cache of infinite size would have, counted in whole pieces."""
    seen: set[int] = set()
    hits = 0
    for ids in trace.hash_ids or []:
        matched = 0
        while matched < len(ids) and ids[matched] in seen:
            matched += 1
        hits += matched * PIECE
        seen.update(ids)
    return min(1.0, hits / max(1, int(trace.prompt_tokens.sum())))


def main(
    output: Annotated[Path, typer.Option(dir_okay=False, help="JSON lines, in Mooncake's format.")],
    trace: Annotated[str, typer.Option(help="As `manta simulate --trace`, but no file.")] = "azure-conversation",
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 10.0,
    burstiness: Annotated[float, typer.Option(help="1 is a Poisson process, below 1 requests come in bursts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
) -> None:
    """Write a synthetic trace, and show its lengths."""
    found = make_trace(trace, requests, rate, burstiness=burstiness, seed=seed)
    write(found, output)
    for name, lengths in (("prompt", found.prompt_tokens), ("output", found.output_tokens)):
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
        print(f"{name} tokens: mean {lengths.mean():.0f}, p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}")
    print(f"an endless prefix cache would have {reuse(found):.1%} of all prompt tokens")


if __name__ == "__main__":
    run(main)
