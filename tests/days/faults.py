# ruff: noqa: E501
"""Thirty-five faults, and the days that find them: python -m tests.days.faults [--days N] [NUMBER...]"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

from tests.faults.fault import Fault

ROOT = Path(__file__).parents[2]
DECODE = "engine/kv_transfer/protocol/decode_side.py"
PREFILL = "engine/kv_transfer/protocol/prefill_side.py"
ROWS = [
    ("KV whose lease ended before it was released is taken for good", DECODE, "        if not message.held:\n", "        if False:\n"),
    ("a handoff ends while its blocks are still written", DECODE, "        if self.reading is None:\n            self._end(now)", "        if True:\n            self._end(now)"),
    ("blocks count as validated without an echo", "engine/kv_transfer/protocol/receive_state.py", "        self.read = self.started\n", "        self.read = self.validated = self.started\n"),
    ("a heartbeat sent before a read counts for it", "engine/kv_transfer/protocol/receive_state.py", "while self._unvalidated and self._unvalidated[0][0] <= heartbeat:", "while self._unvalidated and self._unvalidated[0][0] <= heartbeat + 1:"),
    ("a heartbeat does not extend the lease", PREFILL, "                self.lease_until = now + self._config.lease_s\n", "                pass\n"),
    ("a prefill engine never ends a lease", PREFILL, "        if now >= self.lease_until:\n", "        if False:\n"),
    ("a release is not repeated", DECODE, "            self._send(Release(self.remote_request.handoff_id, self.lease))\n        elif self.state is DecodeHandoffState.STOPPING:", "            pass\n        elif self.state is DecodeHandoffState.STOPPING:"),
    ("a claim is not repeated", DECODE, "        elif self.state is DecodeHandoffState.WAITING:\n            self._claim()\n", "        elif self.state is DecodeHandoffState.WAITING:\n            pass\n"),
    ("a request that moves hands over blocks that the other engine has", PREFILL, "            skip = message.skip // self._block_size\n", "            skip = 0\n"),
    ("calls stay after their requests", "engine/serving/endpoint.py", "        if delta.finish_reason and not delta.records(KVSource):", "        if False:"),
    ("blocks are freed twice", "engine/core/single_type_kv_cache_manager.py", "        self.pool.release(request.tables[self._group].held, request)\n\n", "        self.pool.release(request.tables[self._group].held, request)\n        self.pool.release(request.tables[self._group].held[:1], request)\n\n"),
    ("a reservation is reported while steps still write there", "engine/core/door/outputs.py", "(self.planned if after_steps else 0, message)", "(0, message)"),
    ("an answer has one token more than max_tokens", "engine/core/output.py", "return \"length\" if num_output >= request.max_tokens else None", "return \"length\" if num_output > request.max_tokens else None"),
    ("blocks are cached before they are computed", "engine/core/single_type_kv_cache_manager.py", "full = max(first, min(computed, len(request.tokens)) // size)", "full = max(first, len(request.tokens) // size)"),
    ("a duplicate block is not freed", "engine/core/block_pool.py", "            self._refer([duplicate], holder)\n            self.release([block], holder)", "            self._refer([duplicate], holder)"),
    ("a prefix match goes on behind a hole", "engine/core/block_pool.py", "            if block is None:\n                break\n            blocks.append(block)", "            if block is not None:\n                blocks.append(block)"),
    ("an ended request's blocks stay when its KV arrives", "engine/parts/handoffs/handoffs.py", "        if request.state is State.FINISHED:\n            self._kernel.kv_cache.release(request)\n            return False", "        if request.state is State.FINISHED:\n            return False"),
    ("a failed handoff's blocks count as whole", "engine/parts/handoffs/handoffs.py", "        if not self._keep(request, event.verified):\n", "        if not self._keep(request, len(request.tokens)):\n"),
    ("a request that moves takes a wrong token along", "engine/parts/handoffs/moves.py", "held.hold(request, blocks, token, logprob,", "held.hold(request, blocks, request.tokens[-1], logprob,"),
    ("a retry forgets the output so far", "engine/wire/generate_request.py", "        prompt = [*self.prompt, *output]\n", "        prompt = [*self.prompt, *output[:-1]]\n"),
    ("a retry draws with another seed", "deployments/frontend/retry.py", "seed=signed(seed_of(request.request_id))", "seed=signed(seed_of(self.request_id))"),
    ("lost tokens are not missed", "deployments/frontend/retry.py", "if delta.position != len(self.output):", "if delta.position < len(self.output):"),
    ("deltas of an attempt that was given up are taken", "deployments/frontend/inboxes.py", "        self._inboxes[new] = self._inboxes.pop(old)\n", "        self._inboxes[new] = self._inboxes[old]\n"),
    ("a call that fails first is not noticed", "deployments/frontend/sequence.py", "            self.error = error\n            self._wake()", "            self.error = error"),
    ("a client that leaves does not abort its request", "deployments/frontend/generation.py", "                if not sequence.finished:\n                    sequence.abort()", "                if False:\n                    sequence.abort()"),
    ("a cancelled call does not reach the engine", "deployments/replicas/engine_control.py", "        except asyncio.CancelledError:\n            self.send(request.cancel)\n            raise", "        except asyncio.CancelledError:\n            raise"),
    ("a request that leaves the queue keeps its place", "engine/fairness/fair_queue.py", "            client.num_running -= 1\n            self.num_running -= queued.sequences", "            client.num_running -= 1"),
    ("the ingress's queue never looks at its engines again", "deployments/frontend/admission.py", "            self._queue.leave(queued)\n            self._start()", "            self._queue.leave(queued)"),
    ("a router counts a request twice after a lost update", "engine/serving/kv_events.py", "            admitted=list(live),\n", "            admitted=[],\n"),
    ("a placement stays after its request", "deployments/routing/placements.py", "        reports = self.records[placement.engine].last_update is not None and request_id not in self._missed\n", "        reports = self.records[placement.engine].last_update is not None\n"),
    ("the blocks of an image are given away before a step has copied them", "engine/parts/images/image_handoffs.py", "        blocks, engine_id = ready\n", "        blocks, engine_id = ready\n        self._free += blocks\n"),
    ("what other ingresses have used of a limit is used again", "deployments/quotas/record.py", "if holder != without)", "if holder != without and without)"),
    ("an ingress works on a batch that another one has", "deployments/openai/batches/store.py", "        if not await self._lease.take(await self._store.values.settled()):\n", "        if not await self._lease.take(await self._store.values.settled()) and False:\n"),
    ("a pool with work is scaled to zero", "cluster/autoscaling/scaler.py", "        busy = load.busy or starting or", "        busy = starting or"),
    ("an ingress goes on to compute an answer that another one has taken over", "deployments/jobs/lease.py", "                    task.cancel()\n", "                    pass\n"),
]  # fmt: skip
FAULTS = [Fault(*row, ()) for row in ROWS]


def plant(fault: Fault) -> None:
    """Make the module of `fault.file`, which must not have been imported, be compiled with the fault."""
    source = (ROOT / fault.file).read_text()
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.file} must have these lines once:\n{fault.old}")
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if self.path == str(ROOT / fault.file):
            return compile(source.replace(fault.old, fault.new), self.path, "exec")
        return original(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def hunt(fault: Fault, days: int) -> str:
    """Return which day finds a fault, after how much CPU time, and how."""
    plant(fault)
    from tests.days.day import Day
    from tests.days.world import run

    logging.disable(logging.CRITICAL)
    gc.freeze()
    began = time.process_time()
    for seed in range(days):
        outcome = run(Day.of(seed))
        if outcome.error is not None:
            return f"seed {seed} | {time.process_time() - began:.1f} s | {outcome.kind}"
    return f"not found in {days} days | {time.process_time() - began:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.days.faults", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--days", type=int, default=200)
    parser.add_argument("--here", action="store_true", help="plant the one fault in this process")
    args = parser.parse_args()
    if args.here:
        print(hunt(FAULTS[args.numbers[0]], args.days))
        return
    found = 0
    for number in args.numbers or range(len(FAULTS)):
        command = [sys.executable, "-m", "tests.days.faults", "--here", str(number), "--days", str(args.days)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        outcome = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
        found += outcome.startswith("seed")
        print(f"| {number} | {FAULTS[number].says} | {outcome} |", flush=True)
    print(f"found={found} of={len(args.numbers or FAULTS)}")


if __name__ == "__main__":
    main()
