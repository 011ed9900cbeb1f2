# ruff: noqa: E501
"""Ten faults of the handoff protocol, and what finds each: python -m tests.protocols.faults [--machine S] [NUMBER...]

--machine: for how many CPU seconds the random machine (tests/engine/kv_transfer/test_handoff_machine.py) looks for it too."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tests.days.faults import ROOT, plant
from tests.faults.fault import Fault

DECODE = "engine/kv_transfer/protocol/decode_side.py"
PREFILL = "engine/kv_transfer/protocol/prefill_side.py"
PROTOCOL = "engine/kv_transfer/protocol/protocol.py"
RECEIVE = "engine/kv_transfer/protocol/receive_state.py"
MOST = 100_000  # states
ROWS = [
    ("a release of an earlier lease ends the next one, and is confirmed", PROTOCOL, "if handoff is None or (handoff.decode, handoff.lease) != (sender, message.lease):", "if handoff is None or handoff.decode != sender:", ("a prompt that is accepted again",)),
    ("a request that is accepted again gets the lease that it had", PROTOCOL, "remote_request, self._ranks, next(self._leases), config=self._config", "remote_request, self._ranks, 1, config=self._config", ("a prompt that is accepted again",)),
    ("a heartbeat that was sent before a read counts for it", RECEIVE, "while self._unvalidated and self._unvalidated[0][0] <= heartbeat:", "while self._unvalidated and self._unvalidated[0][0] <= heartbeat + 1:", ("a prompt",)),
    ("a handoff ends while its blocks are still written", DECODE, "        if self.reading is None:\n            self._end(now)", "        if True:\n            self._end(now)", ("a prompt that is cancelled",)),
    ("what another prefill engine has computed counts too", PROTOCOL, "if handoff is None or (handoff.source and (handoff.source, handoff.lease) != (sender, message.lease)):", "if handoff is None:", ("a prompt, two prefill engines",)),
    ("a release is not repeated", DECODE, "            self._send(Release(self.remote_request.handoff_id, self.lease))\n        elif self.state is DecodeHandoffState.STOPPING:", "            pass\n        elif self.state is DecodeHandoffState.STOPPING:", ("a prompt",)),
    ("a claim is not repeated", DECODE, "        elif self.state is DecodeHandoffState.WAITING:\n            self._claim()\n", "        elif self.state is DecodeHandoffState.WAITING:\n            pass\n", ("a request that two engines claim",)),
    ("a released lease is forgotten at once", PROTOCOL, "(sender, released, now + REMEMBER_S)", "(sender, released, now)", ("a prompt, and time",)),
    ("a block is read before it is full", RECEIVE, "else (self._upto - self._remote_request.skip) // self._block_size", "else -(-(self._upto - self._remote_request.skip) // self._block_size)", ("a prompt of two blocks",)),
    ("prefill says once what it has computed", PREFILL, "        elif now >= self._resend_at:\n            self._tell(now)", "        elif now >= self._resend_at:\n            self._resend_at = now + 1.5 * self._config.heartbeat_s", ("a prompt",)),
]  # fmt: skip
FAULTS = [Fault(*row) for row in ROWS]  #: with the scopes that find them


def explore(fault: Fault) -> str:
    """Return how a planted fault is found, after how many inputs, and after how much CPU time."""
    from tests.protocols.explorer import Explorer, Violation
    from tests.protocols.scopes import SCOPES

    began = time.process_time()
    (name,) = fault.tests
    try:
        found = Explorer(SCOPES[name]).explore(MOST)
    except Violation as violation:
        what, *steps = str(violation).split("\n")
        return f"{name} | {len(steps)} | {time.process_time() - began:.1f} | {what[:70]}"
    return f"{name} | | {time.process_time() - began:.1f} | not found: {found}"


def play(seconds: float) -> str:
    """Let the random machine look for the planted fault, and return after how long it has found it."""
    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test

    from tests.engine.kv_transfer.test_handoff_machine import HandoffMachine

    began = time.process_time()
    while time.process_time() < began + seconds:
        try:
            few = settings(max_examples=50, stateful_step_count=60, database=None, deadline=None, print_blob=False)
            run_state_machine_as_test(HandoffMachine, settings=few)
        except Exception:  # noqa: BLE001 - whatever a fault leads to
            return f"{time.process_time() - began:.0f}"
    return "-"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.protocols.faults", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--machine", type=float, default=0.0)
    parser.add_argument("--here", action="store_true", help="plant the one fault in this process")
    args = parser.parse_args()
    if args.here:
        plant(FAULTS[args.numbers[0]])
        print(play(args.machine) if args.machine else explore(FAULTS[args.numbers[0]]))
        return
    for number in args.numbers or range(len(FAULTS)):
        command = [sys.executable, "-m", "tests.protocols.faults", "--here", str(number)]
        found = [_last_line(command)]
        if args.machine:
            found.append(_last_line([*command, "--machine", str(args.machine)]))
        print(f"| {number} | {FAULTS[number].says} | {' | '.join(found)} |", flush=True)


def _last_line(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


if __name__ == "__main__":
    main()
