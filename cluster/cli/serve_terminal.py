"""Terminal display of `manta serve`: the progress of the start, then totals and problems. All other lines go to
a file."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cluster.cli.sample_request import curl
from placement.console_log import PACKAGES, JsonFormatter


@dataclass(slots=True)
class Phase:
    """A phase of the start. Log lines with the prefixes `begins` and `ends` mark its limits."""

    name: str
    begins: str
    ends: str
    of_ranks: bool = False
    """Whether each rank begins and ends it."""
    began_at: float | None = None
    ended_at: float | None = None
    ranks: set[str] = field(default_factory=set)
    """Ranks that have begun but not ended it."""

    def take(self, message: str, who: str, now: float) -> None:
        """Take in a log line. who: name of the process that wrote it."""
        if message.startswith(self.begins) and (self.of_ranks or self.began_at is None):
            self.began_at, self.ended_at = self.began_at or now, None
            self.ranks.add(who)
        if message.startswith(self.ends) and self.began_at is not None:
            self.ranks.discard(who)
            if self.ended_at is None and not (self.of_ranks and self.ranks):
                self.ended_at = now

    def seconds(self, now: float) -> float:
        return (self.ended_at or now) - (self.began_at or now)


def phases() -> list[Phase]:
    return [
        Phase("Ray", "", "Ray is up"),
        Phase("Serve and its proxy", "Ray is up", "proxies are up"),
        Phase("ingress", "Serve is up", "ingress ready"),
        Phase("engines", "rank starts", "loading weights", of_ranks=True),
        Phase("weights", "loading weights", "weights loaded", of_ranks=True),
        Phase("warm-up", "weights loaded", "warmed up", of_ranks=True),
    ]


class ServeTerminal:
    """Displays the log lines of all processes of the cluster. Thread-safe."""

    def __init__(self, console: Console, *, log_requests: bool):
        """log_requests: whether to show each request when it ends, too."""
        self.console = console
        self._log_requests = log_requests
        file, self.log_path = tempfile.mkstemp(prefix="manta-serve-", suffix=".log")
        self._file = os.fdopen(file, "w", buffering=1, encoding="utf-8")
        self._phases = phases()
        self._phases[0].began_at = time.monotonic()
        self._kv_caches: dict[str, str] = {}  # description of the KV cache, by pool
        self._read: dict[str, float] = {}  # fraction of its weights that each rank has read
        self._stopping: str | None = None
        self._spinner = Spinner("dots")
        self._ready: set[str] = set()  # models whose boxes are shown; further ingresses report the same
        self._lock = threading.Lock()
        self._live = Live(get_renderable=self._progress, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> ServeTerminal:
        handler = logging.StreamHandler(_Lines(self))
        handler.setFormatter(JsonFormatter("manta-serve"))
        for package in PACKAGES:
            logger = logging.getLogger(package)
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.INFO)
        for library in ("ray", "ray.serve"):
            logging.getLogger(library).handlers = [logging.StreamHandler(_Lines(self))]
            logging.getLogger(library).propagate = False
        self.console.print(Text(f"Log of Ray and of all processes: {self.log_path}", style="dim"), soft_wrap=True)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._live.stop()
            self._file.close()

    def line(self, text: str) -> None:
        """Take in a line: a JsonFormatter object, or a line of Ray or another library."""
        try:
            fields = msgspec.json.decode(text)
            message, who = str(fields["message"]), str(fields["process"])
        except (msgspec.DecodeError, KeyError, TypeError):
            self._write(text)
            return
        exception = f"\n{fields['exception']}" if "exception" in fields else ""
        self._write(
            f"{fields.get('time', '')} {fields.get('level', '')} {who} {fields.get('logger', '')} {message}{exception}"
        )
        with self._lock:
            self._show(fields, message, who)

    def stopping(self, states: dict[str, int]) -> None:
        """Show what still has to stop. states: number of replicas still stopping, by deployment."""
        waits = ", ".join(f"{name} ({number})" if number > 1 else name for name, number in states.items())
        text = (
            "Stopping. Running requests may finish first; press Ctrl-C again to stop at once. "
            f"Waiting for {waits or 'Ray'}"
        )
        with self._lock:
            self._stopping = text
            if not (self._live.is_started or self._file.closed):
                self._live.start()

    def _show(self, fields: dict[str, Any], message: str, who: str) -> None:
        now = time.monotonic()
        for phase in self._phases:
            phase.take(message, who, now)
        if message.startswith(("loading weights", "weights loaded")):
            self._read[who] = float(fields.get("read", 1.0))
        if message.startswith("kv cache: "):
            self._kv_caches[who.rpartition("-")[0]] = message.removeprefix("kv cache: ")
        if message.startswith("ready address="):
            self._live.stop()
            models = str(fields.get("models", ""))
            if models not in self._ready:
                self._ready.add(models)
                self.console.print(self._box(fields))
                self.console.print("In another terminal:", style="dim")
                self.console.print(Text(self._curl(fields)), soft_wrap=True)
        elif message.startswith("totals "):
            self.console.print(Text(f"{_clock()}  {totals(fields)}"))
        elif fields.get("level") in ("warning", "error", "critical"):
            style = "yellow" if fields["level"] == "warning" else "red"
            self.console.print(Text(f"{_clock()}  {who}: {message}", style=style))
        elif self._log_requests and message.startswith("request ended "):
            self.console.print(Text(f"{_clock()}  {message}", style="dim"))

    def _progress(self) -> RenderableType:
        now, lines = time.monotonic(), Table.grid(padding=(0, 2, 0, 0))
        if self._stopping is not None:
            lines.add_row(self._spinner, Text(self._stopping))
            return lines
        for phase in self._phases:
            if phase.began_at is None:
                continue
            mark = self._spinner if phase.ended_at is None else Text("✓", style="green")
            bar = None
            if phase.name == "weights" and phase.ended_at is None:
                bar = ProgressBar(completed=100 * min(self._read.values()), width=30)
            lines.add_row(mark, phase.name, f"{phase.seconds(now):.1f} s", bar)
        return lines

    def _box(self, fields: dict[str, Any]) -> Panel:
        address, caches = str(fields.get("address", "")), self._kv_caches
        spent = ", ".join(f"{p.name} {p.seconds(p.ended_at):.1f} s" for p in self._phases if p.began_at and p.ended_at)
        rows = [
            ("address", f"{address}/v1"),
            ("console", f"{address}/"),
            ("models", str(fields.get("models", "")).replace(",", ", ")),
            *(("KV cache", f"{pool}: {text}" if len(caches) > 1 else text) for pool, text in caches.items()),
            ("start", spent),
            ("stop", "Ctrl-C"),
        ]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for name, text in rows:
            if text:
                table.add_row(name, Text(text))
        title = Text(f"Manta is ready after {time.monotonic() - (self._phases[0].began_at or 0.0):.1f} s")
        return Panel(table, title=title, border_style="cyan", expand=False)

    def _curl(self, fields: dict[str, Any]) -> str:
        """Return a command that asks the first model."""
        model = str(fields["models"]).partition(",")[0]
        return curl(str(fields["address"]), model, str(fields["task"]), needs_key=bool(fields["needs_key"]))

    def _write(self, text: str) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(text + "\n")


class _Lines:
    """A stream that passes complete lines to a terminal."""

    def __init__(self, terminal: ServeTerminal):
        self._terminal = terminal

    def write(self, text: str) -> None:
        for line in text.splitlines():
            self._terminal.line(line)

    def flush(self) -> None:
        pass


def totals(fields: dict[str, Any]) -> str:
    """Format the values of a `totals` line for people."""
    return (
        f"in {fields['prompt_tokens_per_s']:.0f}, out {fields['output_tokens_per_s']:.0f} tokens/s, "
        f"running {fields['running']}, waiting {fields['waiting']}, KV {100 * fields['kv_use']:.0f} %, "
        f"prefix hits {100 * fields['hit_rate']:.0f} %"
    )


def _clock() -> str:
    return time.strftime("%H:%M:%S")
