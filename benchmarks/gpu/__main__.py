"""Whether the engine works on this GPU, and how fast. Prints its table last.

    python -m benchmarks.gpu --out build/gpu          # fifteen minutes: `make bench-gpu`
    python -m benchmarks.gpu --out build/gpu --first  # the most decisive parts in eight minutes: `make first-gpu`
    python -m benchmarks.gpu --plan 16                # how long those should take with 16 cores; needs no GPU

Needs neither Ray nor weights, a network or an attention library. Each part (parts.py) is a process that ends at its
time limit, so that neither a hang nor a broken CUDA context takes the others along. What comes first decides first:
tests, then the card's own rates, steps against them, and where their time goes. After every part gpu.json and gpu.md in
`--out` have the results so far; `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import plan
from benchmarks.gpu.card import Card
from benchmarks.gpu.first import FIRST, FIRST_S
from benchmarks.gpu.parts import PARTS, SANITIZER, Part

BENCH_S = 900
MIN_S = 20  # in which a part is worth starting


@dataclass(slots=True)
class Row:
    """A row of the report."""

    name: str
    seconds: float = 0.0
    planned_s: float = 0.0  #: 0 for parts without a plan
    numbers: dict[str, float] = field(default_factory=dict)  #: by unit
    problem: str | None = None
    failed: list[str] = field(default_factory=list)  #: tests
    device: str = ""

    def took(self) -> str:
        return f"{self.seconds:.0f} s" + (f" of {self.planned_s:.0f} planned" if self.planned_s else "")

    def result(self) -> str:
        values = ", ".join(f"{value:.4g} {unit}" for unit, value in self.numbers.items())
        return "; ".join(text for text in (values, self.problem, " ".join(self.failed[:3])) if text)


def card_of(rows: list[Row]) -> Card:
    """The card's rates, as far as they have been measured."""
    numbers = {row.name: row.numbers for row in rows}
    copied = numbers.get("copy", {}).get("GB/s", float("nan"))
    return Card(1e9 * copied, 1e12 * numbers.get("matrix product, bf16", {}).get("TFLOP/s", float("nan")))


def run_part(part: Part, limit_s: float, out: Path, rows: list[Row]) -> Row:
    """Run a part in a process of its own, and end that at the limit, with all its children."""
    row, began, command = Row(part.name), time.monotonic(), list(part.command)
    found, report = out / "part.json", out / "part.xml"
    for file in (found, report):
        file.unlink(missing_ok=True)
    if part.name == SANITIZER:
        failed = [test for earlier in rows for test in earlier.failed]
        if not failed or not (tool := shutil.which("compute-sanitizer")):
            row.problem = "compute-sanitizer is not installed" if failed else "no test has failed"
            return row
        command = [tool, sys.executable, "-m", "pytest", failed[0], "-q", "-p", "no:xdist"]
    elif part.measure is not None:
        command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--part", part.name]
    else:
        command = [sys.executable, *command, *([f"--junitxml={report}"] if "pytest" in command else [])]
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
            row.problem = f"exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            row.problem = f"took more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    try:
        if report.is_file():
            row.numbers, row.failed = tests_in(report)
        if found.is_file():
            result = json.loads(found.read_text(encoding="utf-8"))
            row.numbers, row.device = result["numbers"], result["device"]
            row.problem = result["problem"] or row.problem
    except (ET.ParseError, ValueError) as error:  # it was ended while it wrote them
        row.problem = row.problem or f"its results cannot be read: {error}"
    row.seconds = time.monotonic() - began
    return row


def tests_in(report: Path) -> tuple[dict[str, float], list[str]]:
    """How many tests passed, failed and were skipped, and which failed."""
    counts, failed = {"passed": 0.0, "failed": 0.0, "skipped": 0.0}, []
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
    return counts, failed


def measure(part: Part, out: Path) -> int:
    """Measure a part in this process, and leave its numbers in part.json."""
    import logging
    import traceback

    import torch

    logging.basicConfig(format="%(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    result: dict[str, Any] = {"numbers": {}, "problem": None, "device": torch.cuda.get_device_name()}
    assert part.measure is not None
    try:
        found = part.measure(card_of(saved(out)))
        for numbers in [found] if isinstance(found, dict) else found:
            result["numbers"] |= numbers
            write(out / "part.json", result)
    except Exception as error:  # noqa: BLE001 - the table says what it was
        what = str(error).partition("\n")[0]  # CUDA's errors go on with advice
        result["problem"] = f"{type(error).__name__}: {what}"
        traceback.print_exc()
        write(out / "part.json", result)
    return 1 if result["problem"] else 0


def write(file: Path, result: dict[str, Any]) -> None:
    """Write a part's results so that a reader finds the old ones or the new ones."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.replace(file)


def expected(row: Row, card: Card) -> str:
    """What a step should take at these rates, in ms; nothing where nothing was counted."""
    from benchmarks.gpu.expected import CASES, count

    if row.name not in CASES or not card.bytes_per_s > 0 or not card.flops > 0:
        return ""
    return f"{1e3 * count(CASES[row.name]).expected_s(card, CASES[row.name]):.1f} ms"


def table(rows: list[Row], with_expected: bool = False) -> str:
    import torch

    device, card = next((row.device for row in rows if row.device), "no device"), card_of(rows)
    lines = [f"{device}, torch {torch.__version__}", "", "| part | expected | result | took |", "| --- " * 4 + "|"]
    for row in rows:
        should = expected(row, card) if with_expected else ""
        lines.append(f"| {row.name} | {should} | {row.result()} | {row.took()} |")
    return "\n".join(lines) + "\n"


def save(out: Path, rows: list[Row], text: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps({"parts": [asdict(row) for row in rows]}, indent=1), encoding="utf-8")
    (out / "gpu.md").write_text(text, encoding="utf-8")


def saved(out: Path) -> list[Row]:
    if not (out / "gpu.json").is_file():
        return []
    return [Row(**row) for row in json.loads((out / "gpu.json").read_text(encoding="utf-8"))["parts"]]


def gpus() -> int:
    """How many GPUs torch finds, asked in a process of its own, since this one is to stay without a CUDA context."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--first", action="store_true", help="the parts of `make first-gpu`")
    parser.add_argument(
        "--plan", type=int, nargs="?", const=os.cpu_count(), metavar="CORES",
        help="print how long each part of `make first-gpu` should take on a machine with so many cores",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="seconds in all, 900 or 480; what comes later is left out")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these parts, and the card's own rates")
    parser.add_argument("--resume", action="store_true", help="go on after the parts that gpu.json has")
    parser.add_argument("--part", help="measure this part in this process")
    given = parser.parse_args()
    if given.part:
        code = measure(next(part for part in (*PARTS, *FIRST) if part.name == given.part), given.out)
        sys.stderr.flush()
        if code:
            os._exit(code)  # at once: to leave a broken CUDA context in order may take for ever
        return 0
    if given.plan:
        print(plan.table(plan.plan(given.plan)), end="")
        return 0
    chosen, limit_s = (FIRST, FIRST_S) if given.first else (PARTS, BENCH_S)
    limit_s = limit_s if given.limit is None else given.limit
    if unknown := set(given.only) - {part.name for part in chosen}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {'; '.join(part.name for part in chosen)}")
    if not (found := gpus()):
        print("torch finds no GPU here, so there is nothing to measure", file=sys.stderr)
        return 1
    started, rows = time.monotonic(), saved(given.out) if given.resume else []
    done = {row.name for row in rows if not (row.problem or "").startswith("left out")}
    rows = [row for row in rows if row.name in done]
    save(given.out, rows, table(rows))
    costs = plan.plan(os.cpu_count() or 1) if given.first else {}
    if costs:
        print(plan.table(costs), file=sys.stderr, flush=True)
    for part in chosen:
        wanted = not given.only or part.name in (*given.only, "copy", "matrix product, bf16")
        if part.name in done or part.gpus > found or not wanted:
            continue
        planned_s = plan.seconds(costs.get(part.name, []))
        left = limit_s - (time.monotonic() - started)
        if left < MIN_S:
            rows.append(Row(part.name, planned_s=planned_s, problem=f"left out: the {limit_s} s are over"))
            continue
        print(f"[{time.monotonic() - started:4.0f} s] {part.name} ...", file=sys.stderr, flush=True)
        rows.append(replace(run_part(part, min(part.limit_s, left), given.out, rows), planned_s=planned_s))
        print(f"[{time.monotonic() - started:4.0f} s] {part.name}: {rows[-1].result()}", file=sys.stderr, flush=True)
        save(given.out, rows, table(rows))  # so that a run that is cut off leaves what it has
    text = table(rows, with_expected=True)
    save(given.out, rows, text)
    print(text)
    return 1 if any(row.problem or row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
