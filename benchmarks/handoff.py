"""The fraction of a KV transfer that hides behind the prompt's computing: `python -m benchmarks.handoff`.

A prefill and a decode engine, the prompt computed in chunks, and a link between them that is throttled so that the
transfer alone takes half as long as the computing, as long, and twice as long. In the ideal the first token comes after
max(compute, transfer) + one chunk (its transfer, or its computing, whichever cannot overlap). Medians of 5.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from engine.config import EngineConfig
from engine.kv_transfer.transport.worker import KVTransferWorker
from engine.options.handoff import HandoffConfig
from tests.engine.kv_transfer.link import Link
from tests.engine.kv_transfer.pair import Pair
from tests.models import make_model
from tests.rank_pool import RankPool

PROMPT, CHUNK, ROUNDS = 1024, 64, 5
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
}


links: list[Link] = []


class LinkedWorker(KVTransferWorker):
    """A worker whose memory others reach over a link."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        link = Link.to(self.description["tcp"])
        self.description = {**self.description, "tcp": link.describe(self.description["tcp"])}
        links.append(link)


def config(folder: Path, role: Literal["decode", "prefill"]) -> EngineConfig:
    handoff = HandoffConfig(role=role, transport="tcp", policy="always", progress_s=30.0)
    return EngineConfig(
        model=str(folder),
        num_gpu_blocks_override=512,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        num_threads=1,
        handoff=handoff,
    )


def first_token_s(pair: Pair, name: str, seed: int) -> float:
    prompt = [5 + (i * 7 + seed * 13) % 80 for i in range(PROMPT)]
    began = time.perf_counter()
    pair.ingress.add(name, prompt, max_tokens=1, timeout_s=120.0)
    pair.ingress.last(name)
    return time.perf_counter() - began


def median_s(pair: Pair, name: str) -> float:
    times = []
    for round_ in range(ROUNDS):
        times.append(first_token_s(pair, f"{name}-{round_}", round_))
        pair.forget()
    return statistics.median(times)


def main() -> None:
    ranks = RankPool(), RankPool()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("engine.kv_transfer.transport.ranks.KVTransferWorker", LinkedWorker),
    ):
        model = make_model(Path(folder), "llama", **SHAPE)
        with Pair(config(model, "decode"), config(model, "prefill"), ranks) as pair:
            link = links[1]  # of prefill, which is read from
            median_s(pair, "warm")
            compute_s = median_s(pair, "free")
            status = pair.decode.status
            assert status is not None and status.handoffs is not None
            moved = sum(status.handoffs.bytes_read.values()) / (2 * ROUNDS)
            print(f"{PROMPT} tokens in chunks of {CHUNK}, {moved / 2**20:.1f} MiB; over a free link {compute_s:.3f} s")
            columns = ("link, MiB/s", "transfer, s", "total, s", "ideal, s", "total/ideal", "in turn, s")
            print("".join(f"{column:>13}" for column in columns))
            for ratio in (0.5, 1.0, 2.0):
                rate = moved / (ratio * compute_s)
                link.throttle(rate)
                total_s = median_s(pair, f"link-{ratio}")
                transfer_s = moved / rate
                ideal_s = max(compute_s, transfer_s) + min(compute_s, transfer_s) * CHUNK / PROMPT
                row = (rate / 2**20, transfer_s, total_s, ideal_s, total_s / ideal_s, compute_s + transfer_s)
                print("".join(f"{value:>13.3f}" for value in row))


if __name__ == "__main__":
    main()
