"""Writes synthetic traffic of `manta simulate --trace NAME` to a file, for other tools or for a look at it.

python -m benchmarks.simulator.write_trace --trace mooncake --requests 10000 --output trace.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import run
from cluster.lab.simulator.conversations.dialogue import TOKEN_S
from cluster.lab.simulator.trace import Trace, make_trace

BLOCK = 64  # tokens per hash id of a conversation


def write(trace: Trace, path: Path) -> None:
    """Write JSON lines that `Trace.read` takes: conversations in Weka's format, other requests in Mooncake's."""
    if trace.turns is not None:
        lines = weka_conversations(trace)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return
    with path.open("w", encoding="utf-8") as file:
        for i in range(len(trace)):
            line = {
                "timestamp": round(1000 * float(trace.arrivals_s[i]), 3),
                "input_length": int(trace.prompt_tokens[i]),
                "output_length": int(trace.output_tokens[i]),
            }
            file.write(json.dumps(line | ({"hash_ids": trace.hash_ids[i]} if trace.hash_ids else {})) + "\n")


def weka_conversations(trace: Trace) -> list[dict[str, Any]]:
    """Return an object for each conversation, as Weka's traces have it (`conversations/weka.py`). What conversations
    share is not in it: AIPerf takes no hash ids of more than one."""
    blocks: dict[tuple[int, tuple[int, ...]], int] = {}  # by the block before, and tokens
    whole, entries = dict[int, dict[str, Any]](), dict[tuple[int, int], dict[str, Any]]()
    for index, turn in enumerate(trace.turns or []):
        tokens, hash_ids = trace.prompt(index), [0]
        for begin in range(0, len(tokens), BLOCK):
            key = hash_ids[-1], tuple(tokens[begin : begin + BLOCK])
            hash_ids.append(blocks.setdefault(key, len(blocks) + 1))
        at_s, output = float(trace.arrivals_s[index]), int(trace.output_tokens[index])
        told = {"id": f"{trace.name}-{turn.session}", "models": ["model"], "block_size": BLOCK, "requests": []}
        conversation = whole.setdefault(turn.session, told | {"hash_id_scope": "local"})
        if turn.agent and (turn.session, turn.agent) not in entries:
            entry = {"t": at_s, "type": "subagent", "agent_id": f"agent_{turn.agent:03}", "subagent_type": "Explore"}
            entry |= {"status": "completed", "models": ["model"], "requests": []}
            entries[turn.session, turn.agent] = entry
            conversation["requests"].append(entry)
        requests = entries.get((turn.session, turn.agent), conversation)["requests"]
        call = {"t": at_s, "type": "s", "model": "model", "in": len(tokens), "out": output, "hash_ids": hash_ids[1:]}
        requests.append(call | {"api_time": output * TOKEN_S, "think_time": turn.think_s})
    return list(whole.values())


def reuse(trace: Trace) -> float:
    """Return the fraction of all prompt tokens that a cache of infinite size would have, counted in whole pieces."""
    seen: set[tuple[int, int]] = set()
    hits = 0
    for index in range(len(trace) if trace.hash_ids else 0):
        pieces, known = list(trace.pieces(index)), True
        for piece in pieces:
            known = known and piece in seen
            hits += piece[1] if known else 0
        seen.update(pieces)
    return hits / max(1, int(trace.prompt_tokens.sum()))


def main(
    output: Annotated[Path, typer.Option(dir_okay=False, help="JSON lines, in Mooncake's format; agents in Weka's.")],
    trace: Annotated[str, typer.Option(help="As `manta simulate --trace`, but no file.")] = "azure-conversation",
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 10.0,
    burstiness: Annotated[float, typer.Option(help="1 is a Poisson process, below 1 requests come in bursts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
    scale: Annotated[float, typer.Option(help="Factor of all tokens, at most 1.")] = 1.0,
) -> None:
    """Write a synthetic trace, and show its lengths."""
    found = make_trace(trace, requests, rate, burstiness=burstiness, seed=seed).scaled(scale)
    write(found, output)
    for name, lengths in (("prompt", found.prompt_tokens), ("output", found.output_tokens)):
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
        print(f"{name} tokens: mean {lengths.mean():.0f}, p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}")
    print(f"an endless prefix cache would have {reuse(found):.1%} of all prompt tokens")


if __name__ == "__main__":
    run(main)
