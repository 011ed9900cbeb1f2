"""Speed of blocks between two processes of this machine: `python -m benchmarks.kv_transfer [transport ...]`.

A source process and this one, each with a cache of 1024 blocks of 64 KB (4 layers, 4 KV heads, 16 tokens of 32 floats:
the pocket model's); reads of 256 blocks, median of 50.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

from engine.kv_transfer.transport.base import BlockReads
from engine.kv_transfer.transport.head_map import HeadPart
from engine.kv_transfer.transport.memory import BlockMemory
from engine.kv_transfer.transport.worker import open_transports

BLOCKS, READ, ROUNDS = 1024, 256, 50


def cache() -> torch.Tensor:
    return torch.arange(BLOCKS).float().view(-1, 1, 1, 1, 1, 1).expand(-1, 4, 2, 4, 16, 32).contiguous()


def serve(name: str) -> None:
    transport = open_transports(BlockMemory(cache()), "127.0.0.1", name, 5.0)[name]
    print(json.dumps(transport.describe().hex()), flush=True)
    sys.stdin.read()
    transport.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def measure(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.kv_transfer", "serve", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        source = bytes.fromhex(json.loads(process.stdout.readline()))
        here, there = torch.zeros_like(cache()), cache()
        transport = open_transports(BlockMemory(here), "127.0.0.1", name, 5.0)[name]
        order = np.random.default_rng(0)
        run, mixed = list(range(100, 100 + READ)), order.permutation(BLOCKS)[:READ].tolist()
        for what, remote, local, part in (
            ("run to run", run, run, HeadPart(0, 0, 0, 4)),
            ("scattered", mixed, mixed[::-1], HeadPart(0, 0, 0, 4)),
            ("half the heads", run, run, HeadPart(0, 2, 0, 2)),
        ):
            times, num_bytes = [], 0
            spent = [cpu_s(pid) for pid in (os.getpid(), process.pid)]
            for _ in range(ROUNDS):
                started = time.perf_counter()
                num_bytes = transport.read(source, BlockReads(remote, local, part), threading.Event())
                times.append(time.perf_counter() - started)
            spent = [cpu_s(pid) - before for pid, before in zip((os.getpid(), process.pid), spent, strict=True)]
            heads = slice(part.local_start, part.local_start + part.count)
            assert torch.equal(here[local][:, :, :, heads], there[remote][:, :, :, heads])
            gb = num_bytes / 1e9
            reader, writer = (seconds / ROUNDS / gb for seconds in spent)
            print(
                f"{name:5} {what:15} {gb * 1e3:5.1f} MB {gb / statistics.median(times):6.2f} GB/s, best"
                f" {gb / min(times):5.2f}; CPU s per GB: reader {reader:5.2f} source {writer:5.2f}"
            )
        transport.close()
        process.stdin.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        for name in sys.argv[1:] or ["tcp", "nixl"]:
            measure(name)
