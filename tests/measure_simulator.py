"""The simulator against what it stands for: python -m tests.measure_simulator [engine | routing | split | scale]

engine: two real engines of the bundled model, requests in turn, against a simulation with the cost fitted to such an
    engine. Their clocks count the CPU time that a step takes, so that other programs on the machine do not matter, and
    jump over idle times.
routing: SGLang's benchmark of its cache-aware router; published: 1.9 times the throughput of random routing.
split: the first figure of DistServe; published: 2.1 times the goodput per GPU, against whole prompts in one pool.
scale: 1,000 replicas, 1,000,000 requests.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from cluster.simulator.calibration import StepRecorder, measure_steps
from cluster.simulator.cluster import simulate
from cluster.simulator.hardware import CARDS, MODELS, kv_tokens, roofline
from cluster.simulator.records import Latencies, Report
from cluster.simulator.requests import make_request
from cluster.simulator.spec import ClusterSpec, Network, PoolSpec, Slo
from cluster.simulator.step_cost import StepCost, fit
from cluster.simulator.synthetic import lognormal, make_trace, shared_prefix
from cluster.simulator.trace import Trace
from engine.config import EngineConfig
from engine.core import EngineCore

ENGINES = 2
CONFIG = EngineConfig(
    num_blocks=4096,
    num_threads=1,
    overlap=False,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    enable_prefix_caching=False,
)
NO_LIMIT = 10**9


# -- engine ------------------------------------------------------------------------------------------------


class TimedEngine:
    """A real engine on a clock of its own, which is `now`: it moves by the CPU time of each step."""

    def __init__(self) -> None:
        self.core = EngineCore(CONFIG)
        self.now = 0.0
        self.gaps: list[float] = []
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
                self.gaps.append(self.now - last_at[index])
            last_at[index] = self.now


def small_trace(requests: int, rate: float, seed: int) -> Trace:
    """Conversations as short as the bundled model's context asks for."""
    arrivals = make_trace("fixed", requests, rate, seed=seed).arrivals_s
    rng = np.random.default_rng(seed)
    return Trace("small", arrivals, lognormal(rng, requests, 150, 190, 900), lognormal(rng, requests, 40, 55, 200))


def run_engines(engines: list[TimedEngine], trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """When the first and the last token of each request came."""
    first_at, last_at = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
    queues = [[i for i in range(len(trace)) if i % len(engines) == n] for n in range(len(engines))]
    for engine, queue in zip(engines, queues, strict=True):
        engine.now, engine.gaps = 0.0, []
        while queue or engine.core.has_work:
            if not engine.core.has_work:
                engine.now = max(engine.now, float(trace.arrivals_s[queue[0]]))
            while queue and trace.arrivals_s[queue[0]] <= engine.now:
                engine.core.add(real_request(trace, queue.pop(0), engine.core))
            engine.step(first_at, last_at)
    return first_at, last_at


def real_request(trace: Trace, index: int, core: EngineCore):
    request = make_request(trace, index)
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
        trace = trace.at_rate(load * capacity(fit(*before).cost, trace) * ENGINES)
        recorders = [StepRecorder(timed.core, time.process_time) for timed in engines]
        with recorders[0], recorders[1]:
            first_at, last_at = run_engines(engines, trace)
        after = measure_steps(engines[0].core, clock=time.process_time)
        apart = fit(before[0] + after[0], before[1] + after[1])
        within = fit(recorders[0].works + recorders[1].works, recorders[0].seconds + recorders[1].seconds)
        before = after
        print(f"{load:.0%} of capacity, {len(trace) / trace.duration_s:.1f} requests/s; median error of a step "
              f"{apart.error:.1%}, where the cost is fitted in the run {within.error:.1%}", flush=True)  # fmt: skip
        reports = [simulated(found.cost, trace, engines[0].core.max_model_len) for found in (apart, within)]
        compare(engines, trace, first_at, last_at, reports)
    for timed in engines:
        timed.core.close()


def simulated(cost: StepCost, trace: Trace, max_model_len: int) -> Report:
    pool = PoolSpec(replicas=ENGINES, config=CONFIG, cost=cost, num_blocks=4096, router="round_robin")
    network = Network(call_s=0.0, token_s=0.0)
    return simulate(ClusterSpec(decode=pool, network=network, max_model_len=max_model_len), trace, Slo())


def capacity(cost: StepCost, trace: Trace) -> float:
    """Requests per second of one engine that is always full, roughly."""
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    batch = 16
    step = cost.seconds(batch, batch, int(batch * prompt), int(batch * prompt))
    prefill = cost.seconds(int(prompt), 1, int(prompt * prompt / 2), int(prompt))
    return 1 / (prefill + output * step / batch)


def compare(
    engines: list[TimedEngine], trace: Trace, first_at: np.ndarray, last_at: np.ndarray, reports: list[Report]
) -> None:
    ttft, e2e = Latencies.of(first_at - trace.arrivals_s), Latencies.of(last_at - trace.arrivals_s)
    gaps = np.array([gap for timed in engines for gap in timed.gaps])
    itl = 1000 * np.percentile(gaps, [50, 99])
    rows = [(f"TTFT {p}", getattr(ttft, p), [getattr(r.ttft_ms, p) for r in reports]) for p in ("p50", "p90", "p99")]
    rows += [(f"E2E {p}", getattr(e2e, p), [getattr(r.e2e_ms, p) for r in reports]) for p in ("p50", "p90", "p99")]
    rows += [("ITL p50", itl[0], [r.itl_p50_ms for r in reports]), ("ITL p99", itl[1], [r.itl_p99_ms for r in reports])]
    tokens = float(trace.output_tokens.sum()) / float(last_at.max())
    rows += [("output tokens/s", tokens, [r.output_tokens_per_s for r in reports])]
    for label, real, found in rows:
        shown = "".join(f"{value:10.2f}{value / real - 1:+8.1%}" for value in found)
        print(f"  {label:16}{real:10.2f}{shown}", flush=True)


# -- published ratios --------------------------------------------------------------------------------------


def prefix_groups(router: str, groups: int = 64) -> Report:
    """Groups of 16 prompts: 2,048 tokens in common, 128 of their own, 256 out, all at once, on 8 A100s."""
    model, card = MODELS["llama-3.1-8b"], CARDS["a100"]
    arrivals = np.arange(16 * groups) * 1e-6
    rng = np.random.default_rng(1)
    trace = shared_prefix(arrivals, rng, groups=groups, system=2048, question=128, output=256, turns=16)
    config = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=256, max_waiting=NO_LIMIT)
    blocks = kv_tokens(model, card) // config.block_size
    pool = PoolSpec(replicas=8, config=config, cost=roofline(model, card), num_blocks=blocks, router=router)
    return simulate(ClusterSpec(decode=pool), trace, Slo())


def routing() -> None:
    reports = {}
    for router in ("random", "round_robin", "power_of_two", "prefix_aware"):
        reports[router] = report = prefix_groups(router)
        tokens = report.requests_per_s * (2048 + 128 + 256)
        print(f"{router:14}{tokens:10.0f} tokens/s, hit rate {report.hit_rate:.0%}", flush=True)
    print(f"ratio {reports['prefix_aware'].requests_per_s / reports['random'].requests_per_s:.2f}")


STRICT = Slo(ttft_s=0.4, tpot_s=0.04, share=0.9)
DATA_SHEET = roofline(MODELS["opt-13b"], CARDS["a100"])
# fitted to the paper's two figures of one phase alone: 5.6 prefills per second, and 10 requests that only decode
ENGINE_OF_2023 = replace(DATA_SHEET, step_s=0.016, token_s=0.00017)


def goodput(cost: StepCost, decode: int, prefill: int, chunk: int, slo: Slo, *, requests: int = 800) -> float:
    """Requests per second that the cluster takes while 90% keep the SLO: OPT-13B on A100s, 512 tokens in, 64 out."""
    model, card = MODELS["opt-13b"], CARDS["a100"]

    def keeps(rate: float) -> bool:
        config = EngineConfig(max_num_batched_tokens=chunk, max_num_seqs=256, max_waiting=NO_LIMIT)
        pool = PoolSpec(
            replicas=decode, config=config, cost=cost, num_blocks=kv_tokens(model, card) // 16, router="round_robin"
        )
        other = replace(pool, replicas=prefill, config=replace(config, max_num_batched_tokens=8192))
        spec = ClusterSpec(
            decode=pool, prefill=other if prefill else None, kv_bytes=model.kv_bytes, max_model_len=16_384
        )
        return simulate(spec, make_trace("fixed", requests, rate), slo).good >= slo.share

    low, high = 0.0, 1.0
    while keeps(high):
        low, high = high, 2 * high
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def split() -> None:
    """With the cost of the engine of the paper's time, fitted to its two figures of one phase alone, and with the cost
    that a data sheet gives."""
    for name, cost in (("engine of 2023", ENGINE_OF_2023), ("data sheet", DATA_SHEET)):
        alone = (
            goodput(cost, 8, 1, 8192, replace(STRICT, tpot_s=9.0)),
            goodput(cost, 1, 8, 8192, replace(STRICT, ttft_s=9)),
        )
        print(f"{name}: prefill alone {alone[0]:.2f}, decode alone {alone[1]:.2f}", flush=True)
        whole, chunks = goodput(cost, 1, 0, 8192, STRICT), goodput(cost, 1, 0, 256, STRICT)
        two = goodput(cost, 1, 2, 8192, STRICT) / 3
        print(f"  per GPU: whole prompts {whole:.2f}, chunks of 256 {chunks:.2f}, 2 prefill + 1 decode {two:.2f}")
        print(f"  two pools gain {two / whole:.2f} over whole prompts, {two / chunks:.2f} over chunks", flush=True)


# -- scale -------------------------------------------------------------------------------------------------


def scale() -> None:
    model, card = MODELS["llama-3.1-8b"], CARDS["h100"]
    config = EngineConfig(block_size=64, max_num_batched_tokens=2048, max_num_seqs=256, max_waiting=NO_LIMIT)
    pool = PoolSpec(
        replicas=1000,
        config=config,
        cost=roofline(model, card),
        num_blocks=kv_tokens(model, card) // 64,
        router="power_of_two",
    )
    spec = ClusterSpec(decode=pool, max_model_len=32_768)
    trace = make_trace("azure-conversation", 1_000_000, 5000.0)
    started, cpu = time.perf_counter(), time.process_time()
    report = simulate(spec, trace, Slo())
    print(f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU", report, flush=True)


def main() -> None:
    for name in sys.argv[1:] or ["engine", "routing", "split", "scale"]:
        {"engine": engine, "routing": routing, "split": split, "scale": scale}[name]()


if __name__ == "__main__":
    main()
