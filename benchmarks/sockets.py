"""python -m benchmarks.sockets   what it costs that sockets are guarded by the cluster's key: round trips between two
processes over loopback, and CPU time of both, with and without it, alternating."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import msgspec
import zmq

from engine.distributed.cluster_key import ClusterKey
from engine.distributed.sockets import PullSocket, PushSockets
from engine.wire.messages import Abort, Command
from engine.wire.token_delta import TokenBatch, TokenDelta

ROUNDS, WARM_UP, REPEATS = 2000, 200, 5
HOST = "127.0.0.1"
KEY = ClusterKey.generate()


def token_batch(sequences: int) -> TokenBatch:
    deltas = [TokenDelta(request_id=f"chatcmpl-{i:032x}-0", position=9, token_ids=[1234]) for i in range(sequences)]
    return TokenBatch(engine_id="decode-m-abcdef", commands_to=f"tcp://{HOST}:12345", step=1, deltas=deltas)


def main() -> None:
    cases: dict[str, Abort | TokenBatch] = {
        "command of one request": Abort("a" * 40),
        **{f"tokens of {n} sequences": token_batch(n) for n in (1, 64, 256)},
    }
    print("in us, medians of 5 runs of 2000: bytes; round trip plain, guarded; CPU time of both plain, guarded")
    for name, message in cases.items():
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(REPEATS):
            for guarded in found:
                found[guarded].append(round_trips(message, KEY if guarded else None))
        (plain, plain_cpu), (with_key, with_key_cpu) = (
            tuple(1e6 * statistics.median(column) for column in zip(*runs, strict=True)) for runs in found.values()
        )
        size = len(msgspec.msgpack.encode(message))
        print(f"{name:24} {size:6d} {plain:7.0f} {with_key:5.0f} {plain_cpu:7.0f} {with_key_cpu:5.0f}")


def round_trips(message: Abort | TokenBatch, key: ClusterKey | None) -> tuple[float, float]:
    """Return seconds of a median round trip, and CPU seconds of both processes per round trip."""
    with zmq.Context() as context:
        answers: PullSocket[Command] = PullSocket(context, HOST, Command, name="benchmark", key=key)
        secret = msgspec.json.encode(key).decode()
        command = [sys.executable, "-m", "benchmarks.sockets", answers.address, secret]
        echo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert echo.stdout is not None
        address = echo.stdout.readline().strip()
        out, data, times = PushSockets(context, key=key), msgspec.msgpack.encode(message), []
        for i in range(WARM_UP + ROUNDS):
            if i == WARM_UP:
                cpu = time.process_time() + cpu_of(echo.pid)
            started = time.perf_counter()
            out.send(address, data)
            answers.socket.poll()
            for _ in answers.messages():
                pass
            times.append(time.perf_counter() - started)
        cpu = time.process_time() + cpu_of(echo.pid) - cpu
        echo.kill()
        echo.wait()
        context.destroy(linger=0)
    return statistics.median(times[WARM_UP:]), cpu / ROUNDS


def cpu_of(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def echo(address: str, secret: str) -> None:
    """Answer every message with a short one."""
    key = msgspec.json.decode(secret, type=ClusterKey | None)
    context = zmq.Context()
    inbox: PullSocket[Command | TokenBatch] = PullSocket(context, HOST, msgspec.Raw, name="benchmark", key=key)
    print(inbox.address, flush=True)
    out, answer = PushSockets(context, key=key), msgspec.msgpack.encode(Abort("a"))
    while True:
        inbox.socket.poll()
        for _ in inbox.messages():
            out.send(address, answer)


if __name__ == "__main__":
    echo(*sys.argv[1:]) if len(sys.argv) > 1 else main()
