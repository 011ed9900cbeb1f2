"""Streams of a replica that is told to stop go on in others, with their KV. `pytest -s` prints their pauses."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.models import make_model
from tests.serve.chaos_load import run_load
from tests.serve.chaos_streams import run_streams
from tests.serve.moved_streams import is_replayed, moves_of, percentiles, table
from tests.serve.serve_run import ServeRun, kill_all, wait_until

TERM_S = float(os.environ.get("MANTA_TERM_S", "240"))  # of the load beside which replicas get a SIGTERM
TERM_PERIOD_S = 30.0

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600 + 2 * TERM_S)]

BODIES: list[dict[str, Any]] = [
    {"prompt": f"The {word} is", "max_tokens": 1500, "temperature": temperature, "seed": seed, "ignore_eos": True}
    for word in ("ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter")
    for temperature in (0.0, 1.0)
    for seed in (3, 4)
]  # so many that half of them run on a replica of two
REPLAYED = re.compile(r"request replayed .*received_tokens=(\d+) reason=(\S+)")


@contextmanager
def serving(tmp_path: Path, num_replicas: int) -> Iterator[ServeRun]:
    folder = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=4096)
    engine = {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "num_gpu_blocks_override": 3500,
        "max_num_seqs": 32,
    }
    decode = {"num_replicas": num_replicas, "num_cpus": 0.2, "drain_s": 120.0}
    model = {"name": "tiny", "model": str(folder), "engine": engine, "decode": decode}
    with ServeRun(tmp_path, {"models": [model]}) as server:
        server.wait_until_healthy(num_replicas)
        yield server


def lines(server: ServeRun, part: str) -> int:
    return sum(part in line for line in server.log)


def replicas(server: ServeRun) -> list[psutil.Process]:
    """The control actors of decode replicas."""
    return [
        p for p in server.processes() if p.is_running() and "ServeReplica:manta:decode-tiny" in " ".join(p.cmdline())
    ]


def end_by_sigterm(victim: psutil.Process) -> None:
    victim.terminate()
    wait_until(lambda: not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE, timeout_s=40)


def computed_twice(log: list[str]) -> list[str]:
    """The lines that say that tokens of a request were computed again: by a replay, or by a move without its KV."""
    replayed = [line for line in log if (found := REPLAYED.search(line)) and int(found[1])]
    return replayed + [line for line in log if "handoff failed" in line or "preempted request_id" in line]


def test_streams_move_when_their_replica_gets_a_sigterm_or_is_scaled_away(tmp_path):
    """Half of 32 streams run on the replica. Those of a replica that is killed are replayed, for comparison."""
    with serving(tmp_path, 2) as server:
        expected = run_streams(server.url, BODIES)
        assert not expected.problems

        def kill() -> None:
            victim = replicas(server)[0]
            kill_all([*victim.children(recursive=True), victim])

        def scale_down() -> None:
            server.scale("decode-tiny", 1)

        changes = {"SIGKILL": kill, "SIGTERM": lambda: end_by_sigterm(replicas(server)[0]), "scale-down": scale_down}
        for what, change in changes.items():
            begin = len(server.log)
            found = run_streams(server.url, BODIES, change)
            assert not found.problems
            assert found.texts == expected.texts
            log = server.log[begin:]
            moved = [line for line in log if "request moved" in line]
            twice = computed_twice(log)
            if what == "SIGKILL":
                pauses_s = [s.pause_s(found.at) for s in found.streams if is_replayed(server.url, s)]
                print(f"\n{what}: {len(pauses_s)} replayed\n  pause of the client: {percentiles(pauses_s)}")
                assert pauses_s
            else:
                moves = moves_of(server.url, found.streams)
                print(f"\n{what}: {len(moved)} moved, computed twice: {twice}\n{table(moves)}")
                assert moved and not twice
            if what != "scale-down":
                server.wait_for_line("replica ready")  # the one in its place


def test_a_sigterm_of_one_of_three_replicas_every_30_s_is_seen_by_no_client(tmp_path):
    """For MANTA_TERM_S seconds."""
    bodies = [{**body, "max_tokens": 400} for body in BODIES]
    with serving(tmp_path, 3) as server:
        expected = run_streams(server.url, bodies)
        assert not expected.problems
        begin, killed = len(server.log), 0

        def terminate_again_and_again() -> None:
            nonlocal killed
            until = time.monotonic() + TERM_S
            for place in cycle(range(3)):
                due = time.monotonic() + TERM_PERIOD_S
                if due > until:
                    return
                wait_until(lambda: len(replicas(server)) == 3, timeout_s=120)
                end_by_sigterm(replicas(server)[place])
                killed += 1
                server.wait_for_line("replica ready", timeout_s=120)
                time.sleep(max(0.0, due - time.monotonic()))  # the load goes on

        found = run_load(server.url, bodies, 1, terminate_again_and_again, limit_s=300 + 2 * TERM_S)
        log = server.log[begin:]
        changed = [n for n, text in found.answers if text != expected.texts[n]]
        moved, twice = sum("request moved" in line for line in log), computed_twice(log)
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        (pause_s, pauses) = (float(re.findall(rf"^manta_move_pause_seconds_{part}\S* (\S+)$", metrics, re.M)[0])
                             for part in ("sum", "count"))  # fmt: skip
        print(f"\n{killed} replicas ended in {found.change_s:.0f} s: {len(found.answers)} answers, "
              f"{len(found.problems)} failed, {len(changed)} texts changed, {moved} moved with a mean pause of "
              f"{pause_s / max(1, pauses):.3f} s, computed twice: {twice}")  # fmt: skip
        assert not found.problems and not changed and not twice
        assert moved >= killed
