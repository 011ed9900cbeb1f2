"""The tapes of a real cluster with P/D, through deaths and scaling: every decision is made again. `pytest -s` prints
what they hold. MANTA_TAPE_S seconds of `manta bench serve` with MANTA_TAPE_RATE requests per second; two deaths and two
changes of scale in each ROUND_S."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.lab.explorer.outcome import EngineOutcome, replay_whole
from engine.parts.tape.engine_tape import EngineTape
from engine.parts.tape.file import read_tapes
from engine.parts.tape.shared_copy import remove_copies_of, shared_root
from tests.models import make_model
from tests.serve.serve_run import MANTA_SERVE, ServeRun, kill_all, wait_until

TAPE_S = float(os.environ.get("MANTA_TAPE_S", "60"))
RATE = float(os.environ.get("MANTA_TAPE_RATE", "5"))  # requests/s
ROUND_S = min(400.0, TAPE_S)
START_S = 600.0  # of a replica at most
STARTED = re.compile(r"((?:decode|prefill)-\w+-\w+)/rank0 .*rank starts pid=(\d+)")
MANTA = MANTA_SERVE[0]

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600 + 3 * TAPE_S)]


@contextmanager
def serving(tmp_path: Path) -> Iterator[ServeRun]:
    folder = make_model(tmp_path, "llama", tokenizer=True, max_position_embeddings=1024)
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 400, "max_num_seqs": 8,
              "tape_mib": 16, "tape_dir": str(tmp_path / "kept"), "max_kept_tapes": 400}  # fmt: skip
    pool = {"num_cpus": 0.2, "drain_s": 20.0}
    model = {"name": "tiny", "model": str(folder), "engine": engine, "decode": {**pool, "num_replicas": 2},
             "prefill": {**pool, "num_replicas": 1}, "handoff": {"policy": "always", "transport": "tcp"}}  # fmt: skip
    server = ServeRun(tmp_path, {"models": [model]})
    try:
        server.wait_until_healthy(3)
        yield server
    finally:
        (tmp_path / "server.log").write_text("".join(server.log))
        ids = engines(server)
        server.stop()
        remove_copies_of(ids, shared_root())


def engines(server: ServeRun) -> dict[str, int]:
    """Pids of the processes of all engines that were started, by id."""
    found = filter(None, map(STARTED.search, server.worker_lines()))
    return {match[1]: int(match[2]) for match in found}


def living(server: ServeRun, role: str) -> list[int]:
    return [pid for engine, pid in engines(server).items() if engine.startswith(role) and psutil.pid_exists(pid)]


def bench(server: ServeRun, seconds: float) -> subprocess.Popen[str]:
    command = [MANTA, "bench", "serve", "--base-url", server.url, "--request-rate", str(RATE), "--num-prompts",
               str(round(seconds * RATE)), "--input-len", "60", "--prefix-len", "100", "--prefix-groups", "7",
               "--output-len", "40", "--vocab-size", "300", "--json"]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def save(server: ServeRun, file: Path, engines: int) -> list[EngineTape]:
    """engines: that are awaited, since one may not answer yet."""

    def saved() -> bool:
        subprocess.run([MANTA, "tape", "save", str(file), "--url", server.url], check=True)
        return len(read_tapes(file)) == engines

    wait_until(saved, START_S)
    return read_tapes(file)


def show(title: str, tape: EngineTape) -> EngineOutcome:
    found = replay_whole(tape)
    size = sum(len(s.entries) + len(s.answers) + len(s.state) for s in tape.segments)
    print(f"{title:9} {found.engine_id:28} {found.role:8} {found.seconds:6.1f} s {found.requests:5} requests "
          f"{found.steps:6} steps, {found.equal} of {found.plans} plans equal, {size / 2**20:.2f} MiB, "
          f"{tape.reason} {found.problem}")  # fmt: skip
    return found


def run_round(server: ServeRun, began: float, number: int, file: Path) -> list[EngineTape]:
    """A rank of decode dies, decode grows to three, a whole replica of prefill dies. Returns all tapes before decode
    shrinks to two again."""

    def sleep_until(share: float) -> None:
        time.sleep(max(0.0, began + (number + share) * ROUND_S - time.monotonic()))

    def wait_for(role: str, count: int) -> None:
        wait_until(lambda: len(living(server, role)) == count, START_S)

    sleep_until(0.2)
    psutil.Process(living(server, "decode")[number % 2]).kill()  # its control actor lives
    sleep_until(0.4)
    wait_for("decode", 2)
    server.scale("decode-tiny", 3)
    sleep_until(0.6)
    wait_for("decode", 3)
    (victim,) = living(server, "prefill")
    actor = psutil.Process(victim)
    kill_all([p for p in server.processes() if "ServeReplica:manta:prefill" in " ".join(p.cmdline())] + [actor])
    sleep_until(0.8)
    wait_for("prefill", 1)
    tapes = save(server, file, 4)
    server.scale("decode-tiny", 2)
    sleep_until(1.0)
    wait_for("decode", 2)
    return tapes


def test_every_decision_of_a_cluster_with_deaths_and_scaling_is_made_again(tmp_path):
    rounds = round(TAPE_S / ROUND_S)
    with serving(tmp_path) as server:
        began, load = time.monotonic(), bench(server, TAPE_S)
        saved = [run_round(server, began, i, tmp_path / f"{i}.tape") for i in range(rounds)]
        report = json.loads(load.communicate(timeout=120 + TAPE_S)[0])
        saved.append(save(server, tmp_path / "end.tape", 3))
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        kept = [tape for file in sorted((tmp_path / "kept").iterdir()) for tape in read_tapes(file)]
    print(f"\n{report['completed']} requests, {report['failed']} failed, in {report['duration']:.0f} s")
    print("\n".join(line for line in metrics.splitlines() if re.match("manta_latency_(bounds|margin)", line)))
    outcomes = [show(f"round {i}", tape) for i, tapes in enumerate(saved) for tape in tapes]
    outcomes += [show("kept", tape) for tape in kept]
    longest = {one.engine_id: one for one in sorted(outcomes, key=lambda one: one.plans)}.values()
    for title, some in (("engines", [*longest]), ("tapes", outcomes)):
        print(f"{len(some)} {title}: {sum(one.equal for one in some)} of {sum(one.plans for one in some)} plans equal")
    of_dead = [tape.role for tape in kept if "first tokens" not in tape.reason]  # on a busy machine these may be late
    assert sorted(of_dead) == ["decode"] * rounds + ["prefill"] * rounds
    assert not any(outcome.differs for outcome in outcomes)
    assert all(outcome.equal == outcome.plans for outcome in outcomes)
    assert report["failed"] == 0
    command = [MANTA, "replay", str(tmp_path / "end.tape"), "--json"]
    printed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    of_engines, routers = printed[:3], printed[3:]
    print(
        "\n".join(f"router of {one['router']} to {one['pool']}: {one['equal']} of {one['choices']}" for one in routers)
    )
    assert all(one["equal"] == one["plans"] for one in of_engines) and any(one["plans"] for one in of_engines)
    assert all(one["equal"] == one["choices"] > 0 for one in routers)
    assert {one["pool"] for one in routers} == {"decode", "prefill"}
