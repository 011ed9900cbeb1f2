"""`manta tape check`: how far the simulator is off what a running cluster has just done."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from cluster.lab.recorded.prediction import LABELS, told
from cluster.lab.recorded.recording import Recording
from cluster.lab.recorded.what_if import Baseline, PredictedFigure
from cluster.lab.tape.tapes import replayed
from cluster.terminal.tables import make_table, show
from engine.errors import ServingError
from engine.parts.tape.file import read_all


class SimulationCheck:
    """Simulates the requests of a server's present tapes with the options that it has, and publishes the error."""

    def __init__(self, fetch: Callable[[], bytes], sleep: Callable[[float], None] = time.sleep):
        """fetch: returns the server's file of tapes; may raise ServingError."""
        self._fetch, self._sleep = fetch, sleep
        self.registry = CollectorRegistry()
        self._ratio = Gauge(
            "manta_simulation_ratio",
            "What has come, divided by what the simulator expects of the recorded requests.",
            ["figure"],
            registry=self.registry,
        )

    def look(self) -> tuple[list[str], list[PredictedFigure]]:
        """Return what there is to say of the tapes, and each figure as it was and as it is simulated. Raises
        ServingError."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "now.tape")
            file.write_bytes(self._fetch())
            with replayed(read_all([file]), [file]):
                baseline = Baseline(Recording.of_files([file]))
        found = [each for each in baseline.predict(baseline.simulated) if each.name in LABELS]
        for each in found:
            if each.simulated:
                self._ratio.labels(each.name).set(each.recorded / each.simulated)
        return told(baseline.recording), found

    def run(self, every_s: float | None, port: int | None, *, as_json: bool) -> None:
        """Look once, or forever. Raises ServingError only if it looks once."""
        if port is not None:
            start_http_server(port, registry=self.registry)
        while True:
            try:
                show_check(*self.look(), as_json=as_json)
            except ServingError as error:
                if every_s is None:
                    raise
                print(error, file=sys.stderr)
            if every_s is None:
                return
            self._sleep(every_s)


def show_check(sentences: list[str], found: list[PredictedFigure], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({each.name: each.figures() for each in found}), flush=True)
        return
    table = make_table("", "came", "simulated", "error, %")
    for each in found:
        label, scale, decimals = LABELS[each.name]
        values = (f"{scale * value:.{decimals}f}" for value in (each.recorded, each.simulated))
        table.add_row(label, *values, f"{100 * each.error:.0f}")
    show(*sentences, table)
