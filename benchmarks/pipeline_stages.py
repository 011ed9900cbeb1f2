"""Pipeline stages against tensor parallel ranks: python -m benchmarks.pipeline_stages [links | chunks]

links: tokens/s of two stages, of two tensor parallel ranks and of one rank, for several loads. The ranks are on two
    fake nodes (network namespaces). The link between them is not limited, or limited to a rate. For stages also the
    share of the time in which each one waits. The link is limited by a token bucket in each direction. It adds no
    latency, which the network between two machines does. Needs Linux with `unshare`, `ip` and `tc`; no root.
chunks: seconds until prompts are computed over two stages, by the least size of a chunk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.assembly.build import build_engine
from engine.assembly.open_worker import open_worker
from engine.config import EngineConfig
from engine.core.door.inputs import CacheCleared
from engine.core.engine import EngineCore
from engine.distributed.group_options import group_options
from engine.distributed.tp_group import TPGroup
from engine.parts.stages import micro_batches
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.stages import StageReport
from engine.wire.sampling_params import SamplingParams
from tests.models import make_model
from tests.rank_pool import TIMEOUT_S, RankPool

IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]
HOSTS = "10.77.0.1", "10.77.0.2"
RATES = None, "1gbit", "100mbit"
BURST = 6000  # bytes that pass at once: a few packets, so that short messages take the time that the rate gives them
LAYOUTS: tuple[dict[str, Any], ...] = ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2})
LOADS = {  # requests that decode TOKENS tokens, and prompts of PROMPT tokens
    "1 request": (1, 0),
    "2 requests": (2, 0),
    "8 requests": (8, 0),
    "1 long prompt": (0, 1),
    "8 requests, 2 long prompts": (8, 2),
}
TOKENS, PROMPT = 100, 1000
CHUNKS = 32, 64, 128, 256, 512


class SecondNode:
    """A process in a network namespace of its own, in which the other rank runs."""

    def __init__(self) -> None:
        command = ["unshare", "--net", sys.executable, "-m", "benchmarks.pipeline_stages", "node"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._wait_for("ready")
        self._enter = f"nsenter -t {self._process.pid} -n "
        sh("ip link set lo up")
        sh("ip link add manta0 type veth peer name manta1")
        sh(f"ip link set manta1 netns {self._process.pid}")
        for enter, device, host in (("", "manta0", HOSTS[0]), (self._enter, "manta1", HOSTS[1])):
            sh(f"{enter}ip link set lo up")
            sh(f"{enter}ip addr add {host}/24 dev {device}")
            sh(f"{enter}ip link set {device} up")

    def limit(self, rate: str) -> None:
        """Limit the link to a rate, as `tc` writes it, in each direction."""
        for enter, device in (("", "manta0"), (self._enter, "manta1")):
            sh(f"{enter}tc qdisc replace dev {device} root tbf rate {rate} burst {BURST} latency 100ms")

    @contextmanager
    def engine(self, options: dict[str, Any]) -> Iterator[EngineCore]:
        """An engine of two ranks, of which the second runs on this node."""
        config = EngineConfig(**options)
        group = TPGroup.listen(2, HOSTS[0], **group_options(config))
        assert self._process.stdin is not None
        print(json.dumps([options, group.address]), file=self._process.stdin, flush=True)
        group.join(TIMEOUT_S)
        core = build_engine(config, group, host=HOSTS[0])
        try:
            yield core
        finally:
            core.close()
        self._wait_for("done")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line == word, f"the second node said {line!r}"


def node() -> None:
    """Run rank 1 of every engine that the first node names."""
    print("ready", flush=True)
    for line in sys.stdin:
        options, address = json.loads(line)
        config = EngineConfig(**options)
        group = TPGroup.connect(1, 2, address, TIMEOUT_S, **group_options(config))
        open_worker(config, group, HOSTS[1]).run()
        print("done", flush=True)


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


def links() -> None:
    options: dict[str, Any] = {
        "model": str(wide_model()), "device": "cpu", "dtype": "bfloat16", "num_threads": 1,
        "num_gpu_blocks_override": 1024,
        "max_num_batched_tokens": 256,
    }  # fmt: skip
    core = build_engine(EngineConfig(**options, async_scheduling=True))
    measure(core, "one rank")
    core.close()
    other = SecondNode()
    try:
        for rate in RATES:
            if rate is not None:
                other.limit(rate)
            for layout in LAYOUTS:
                (name,) = layout
                with other.engine({**options, **layout}) as core:
                    measure(core, f"{name} 2, link {rate or 'not limited'}")
    finally:
        other.close()


def measure(core: EngineCore, name: str) -> None:
    compute(core, 1, 1)
    for load, (decoding, prompts) in LOADS.items():
        before, started = core.stats().record(StageReport), time.perf_counter()
        tokens = compute(core, decoding, prompts)
        wall_s = time.perf_counter() - started
        waits = ""
        after = core.stats().record(StageReport)
        if before is not None and after is not None:
            busy_s = [new.busy_s - old.busy_s for old, new in zip(before.stages, after.stages, strict=True)]
            waits = ", stages wait " + " ".join(f"{max(0.0, 1 - busy / wall_s):.0%}" for busy in busy_s)
        print(f"{name:40} {load:27} {tokens / wall_s:8.0f} tokens/s{waits}", flush=True)


def compute(core: EngineCore, decoding: int, prompts: int) -> int:
    """Run requests to their end. Returns the number of tokens computed."""
    many = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(decoding):
        core.add(GenerateRequest(request_id=f"decode {i}", prompt=[5, 6, 7 + i], params=many))
    add_prompts(core, prompts)
    while core.has_work:
        core.step()
    core.apply(CacheCleared())
    return TOKENS * decoding + PROMPT * prompts


def add_prompts(core: EngineCore, count: int) -> None:
    for i in range(count):
        prompt = torch.randint(core.model_config.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(i))
        params = SamplingParams(temperature=0.0, max_tokens=1)
        core.add(GenerateRequest(request_id=f"prompt {i}", prompt=prompt.tolist(), params=params))


def chunks() -> None:
    pool = RankPool()
    options: dict[str, Any] = {
        "model": str(wide_model()),
        "device": "cpu",
        "dtype": "bfloat16",
        "num_threads": 1,
        "num_gpu_blocks_override": 1024,
    }
    with pool.engine(EngineConfig(**options, pipeline_parallel_size=2)) as core:
        compute(core, 1, 1)
        for least in CHUNKS:
            micro_batches.LEAST_CHUNK = least
            times = []
            for prompts in (1, 4):
                started = time.perf_counter()
                compute(core, 0, prompts)
                times.append(f"{prompts}: {time.perf_counter() - started:5.2f} s")
            print(f"chunks of {least:4} tokens or more, prompts of {PROMPT}, {', '.join(times)}", flush=True)
    pool.close()


def wide_model() -> Path:
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
    }
    return make_model(
        Path(tempfile.mkdtemp()), "llama", **shape, num_key_value_heads=4, head_dim=64, vocab_size=8192,
        max_position_embeddings=2048,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ["links", "chunks"]:
        if name == "links" and not os.environ.get("MANTA_IN_NAMESPACE"):
            command = [*IN_NAMESPACE, sys.executable, "-m", "benchmarks.pipeline_stages", "links"]
            subprocess.run(command, check=True, env={**os.environ, "MANTA_IN_NAMESPACE": "1"})
        else:
            {"links": links, "chunks": chunks, "node": node}[name]()


if __name__ == "__main__":
    main()
