"""Streams of a replica that is told to stop go on in others, with their KV. `pytest -s` prints their pauses."""

from __future__ import annotations

import re
from typing import Any

import httpx
import psutil
import pytest

from tests.models import make_model
from tests.serve.chaos_streams import run_streams
from tests.serve.serve_run import ServeRun, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

BODIES: list[dict[str, Any]] = [
    {"prompt": f"The {word} is", "max_tokens": 1500, "temperature": temperature, "seed": 3, "ignore_eos": True}
    for word in ("ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter")
    for temperature in (0.0, 1.0)
]


def count(server: ServeRun, name: str) -> float:
    lines = re.findall(rf"^{name}\S* (\S+)$", httpx.get(f"{server.url}/metrics", timeout=30).text, re.MULTILINE)
    return sum(map(float, lines))


def lines(server: ServeRun, part: str) -> int:
    return sum(part in line for line in server.log)


def replicas(server: ServeRun) -> list[psutil.Process]:
    """The control actors of decode replicas."""
    return [
        p for p in server.processes() if p.is_running() and "ServeReplica:manta:decode-tiny" in " ".join(p.cmdline())
    ]


def test_streams_move_when_their_replica_gets_a_sigterm_or_is_scaled_away(tmp_path):
    folder = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=4096)
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 3000, "max_num_seqs": 32}

    def args(num: int) -> dict[str, Any]:
        decode = {"num_replicas": num, "num_cpus": 0.2, "drain_s": 120.0}
        return {"models": [{"name": "tiny", "model": str(folder), "engine": engine, "decode": decode,
                            "handoff": {"move_requests": True}}]}  # fmt: skip

    server = ServeRun(tmp_path, args(2))
    try:
        server.wait_until_healthy(2)
        expected = run_streams(server.url, BODIES)
        assert not expected.problems

        def terminate() -> None:
            victim = replicas(server)[0]
            victim.terminate()
            wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, timeout_s=40)

        for what, change in (("SIGTERM", terminate), ("scale-down", lambda: server.put(args(1)))):
            before = {line: lines(server, line) for line in ("request moved", "request replayed")}
            pauses = [count(server, f"manta_move_pause_seconds_{part}") for part in ("sum", "count")]
            found = run_streams(server.url, BODIES, change)
            assert not found.problems
            assert found.texts == expected.texts
            moved, replayed = (lines(server, line) - n for line, n in before.items())
            pause_s, paused = (
                count(server, f"manta_move_pause_seconds_{part}") - n
                for part, n in zip(("sum", "count"), pauses, strict=True)
            )
            longest = sorted(stream.pause_s(found.at) for stream in found.streams)
            print(f"\n{what}: {moved} moved, {replayed} replayed, mean pause {pause_s / max(1, paused):.3f} s; longest "
                  f"pause of each client P50 {longest[len(longest) // 2]:.3f} s, most {longest[-1]:.3f} s")  # fmt: skip
            assert moved > 0
            if what == "SIGTERM":
                server.wait_for_line("replica ready")  # the one in its place
    finally:
        (tmp_path / "server.log").write_text("".join(server.log))
        server.stop()
