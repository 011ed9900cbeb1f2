"""Two real engines of the bundled model, requests in turn, against a simulation with the cost fitted to such an engine.

Their clocks count the CPU time that a step takes, so that other programs on the machine do not matter, and jump over
idle times.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.simulator.fit import StepRecorder, measure_steps
from benchmarks.simulator.traffic import capacity, small_trace
from cluster.lab.recorded.cost_fit import fit_cost
from cluster.lab.simulator.cluster import simulate
from cluster.lab.simulator.cost_model import CostModel
from cluster.lab.simulator.results import Latencies, Report
from cluster.lab.simulator.spec import ClusterSpec
from cluster.lab.simulator.trace import Trace
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.wire.generate_request import GenerateRequest

ENGINES = 2
CONFIG = EngineConfig(
    block_size=16,
    num_gpu_blocks_override=4096,
    num_threads=1,
    async_scheduling=False,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    enable_prefix_caching=False,
)


class TimedEngine:
    """A real engine on a clock of its own, which is `now`: it moves by the CPU time of each step."""

    def __init__(self) -> None:
        self.core = build_engine(CONFIG)
        self.now = 0.0
        self.itl_s: list[float] = []
        self._last: dict[str, float] = {}

    def step(self, first_at: np.ndarray, last_at: np.ndarray) -> None:
        started = time.process_time()
        events = self.core.step()
        self.now += time.process_time() - started
        for event in events:
            index = int(event.delta.request_id)
            if np.isnan(first_at[index]):
                first_at[index] = self.now
            else:
                self.itl_s.append(self.now - last_at[index])
            last_at[index] = self.now


def run_engines(engines: list[TimedEngine], trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return when the first and the last token of each request came."""
    first_at, last_at = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    queues = [[i for i in range(len(trace)) if i % len(engines) == n] for n in range(len(engines))]
    for engine, queue in zip(engines, queues, strict=True):
        engine.now, engine.itl_s = 0.0, []
        while queue or engine.core.has_work:
            if not engine.core.has_work:
                engine.now = max(engine.now, float(trace.arrivals_s[queue[0]]))
            while queue and trace.arrivals_s[queue[0]] <= engine.now:
                engine.core.add(real_request(trace, queue.pop(0), engine.core))
            engine.step(first_at, last_at)
    return first_at, last_at


def real_request(trace: Trace, index: int, core: EngineCore) -> GenerateRequest:
    request = trace.request(index)
    vocab = core.model_config.vocab_size
    prompt = np.random.default_rng(index).integers(3, vocab, len(request.prompt)).tolist()
    return type(request)(request_id=request.request_id, prompt=prompt, params=request.params)


def engine() -> None:
    """The cost is measured before and after each run, since a machine is not equally fast all the time; and once more
    in the run itself, which shows what is left when the cost is known as well as it can be."""
    engines = [TimedEngine() for _ in range(ENGINES)]
    before = measure_steps(engines[0].core, clock=time.process_time)
    measure_steps(engines[1].core, clock=time.process_time)  # it is warm then, as the first one is
    for load in (0.4, 0.8):
        trace = small_trace(120, 1.0, 7)
        trace = trace.at_rate(load * capacity(fit_cost(*before).cost, trace) * ENGINES)
        recorders = [StepRecorder(timed.core, time.process_time) for timed in engines]
        with recorders[0], recorders[1]:
            first_at, last_at = run_engines(engines, trace)
        after = measure_steps(engines[0].core, clock=time.process_time)
        apart = fit_cost(before[0] + after[0], before[1] + after[1])
        within = fit_cost(recorders[0].works + recorders[1].works, recorders[0].seconds + recorders[1].seconds)
        before = after
        print(f"{load:.0%} of capacity, {len(trace) / trace.duration_s:.1f} requests/s; median error of a step "
              f"{apart.error:.1%}, where the cost is fitted in the run {within.error:.1%}", flush=True)  # fmt: skip
        reports = [simulated(found.cost, trace, engines[0].core.max_model_len) for found in (apart, within)]
        compare(engines, trace, first_at, last_at, reports)
    for timed in engines:
        timed.core.close()


def simulated(cost: CostModel, trace: Trace, max_model_len: int) -> Report:
    spec = ClusterSpec(
        replicas=ENGINES,
        engine=CONFIG,
        cost=cost,
        num_blocks=4096,
        router="round_robin",
        call_s=0.0,
        token_s=0.0,
        max_model_len=max_model_len,
    )
    return simulate(spec, trace)


def compare(
    engines: list[TimedEngine], trace: Trace, first_at: np.ndarray, last_at: np.ndarray, reports: list[Report]
) -> None:
    ttft, e2e = Latencies.of(first_at - trace.arrivals_s), Latencies.of(last_at - trace.arrivals_s)
    itl_s = np.array([gap for timed in engines for gap in timed.itl_s])
    itl = 1000 * np.percentile(itl_s, [50, 99])
    rows = [(f"TTFT {p}", getattr(ttft, p), [getattr(r.ttft_ms, p) for r in reports]) for p in ("p50", "p90", "p99")]
    rows += [(f"E2E {p}", getattr(e2e, p), [getattr(r.e2e_ms, p) for r in reports]) for p in ("p50", "p90", "p99")]
    rows += [("ITL p50", itl[0], [r.itl_p50_ms for r in reports]), ("ITL p99", itl[1], [r.itl_p99_ms for r in reports])]
    tokens = float(trace.output_tokens.sum()) / float(last_at.max())
    rows += [("output tokens/s", tokens, [r.output_tokens_per_s for r in reports])]
    for label, real, found in rows:
        shown = "".join(f"{value:10.2f}{value / real - 1:+8.1%}" for value in found)
        print(f"  {label:16}{real:10.2f}{shown}", flush=True)
