"""KV caches with known contents, and processes that serve one."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from torch import Tensor

from engine.kv_transfer.transport.head_map import HeadShard

LAYERS, BLOCK_SIZE, HEAD_DIM = 2, 4, 8


def full_cache(num_blocks: int, kv_heads: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[num_blocks, layers, 2, kv_heads, block_size, head_dim] of all heads, random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, LAYERS, 2, kv_heads, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def shard_cache(full: Tensor, shard: HeadShard) -> Tensor:
    """What one rank holds of it."""
    return full[:, :, :, shard.start : shard.stop].contiguous()


class SourceProcess:
    """A process with a KVTransferWorker over `full_cache(num_blocks, 2, seed=seed)`, as the only rank of an engine."""

    def __init__(self, transport: str, num_blocks: int, seed: int = 0):
        command = [sys.executable, "-m", "tests.engine.kv_transfer.caches", transport, str(num_blocks), str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._description: dict[str, bytes] | None = None

    @property
    def description(self) -> dict[str, bytes]:
        if self._description is None:
            assert self.process.stdout is not None
            answer = json.loads(self.process.stdout.readline())
            self._description = {name: bytes.fromhex(value) for name, value in answer.items()}
        return self._description

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def serve(transport: str, num_blocks: int, seed: int) -> None:
    from engine.kv_transfer.transport.worker import KVTransferWorker

    worker = KVTransferWorker([full_cache(num_blocks, 2, seed=seed)], shards=[HeadShard(2, 0, 1)], transport=transport)
    print(json.dumps({name: value.hex() for name, value in worker.description.items()}), flush=True)
    sys.stdin.read()  # until the parent ends, however it does
    worker.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
