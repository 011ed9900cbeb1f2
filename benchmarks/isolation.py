"""The effect of long prompts, or of images, on running streams: one engine for both, against a pool for each, on the
same cores."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
import zmq
import zmq.asyncio
from rich.progress import Progress

from benchmarks.command import DtypeOption, JsonOption, SeedOption, print_json, run
from benchmarks.engine_process import Engines
from benchmarks.images import make_model, picture
from cluster.cli.bench.prompts import random_ids
from cluster.terminal.progress import progress_bar
from cluster.terminal.tables import figure, make_table, show
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidParameter
from engine.model.checkpoint.resolve import resolve
from engine.model.config import ModelConfig
from engine.multimodal.image import decode
from engine.multimodal.processor import ImageProcessor
from engine.offline.prompts import ImagePrompt
from engine.options.handoff import HandoffConfig
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.messages import Add
from engine.wire.parts.handoffs import HandoffTotals
from engine.wire.parts.images import ImageStats, PromptImages
from engine.wire.sampling_params import SamplingParams
from engine.wire.token_delta import TokenBatch

STREAM_PROMPT = 32  # tokens
STREAM = "stream-"
LONG_OUTPUT = 4  # tokens; their first is what counts
WARM_S = 2.0  # from the first token of every stream until the measurement
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    streams: int  #: that run all the time
    prompt_len: int  #: tokens of each long prompt
    image_side: int  #: in pixels, of a new square image that each long prompt asks about; 0 for random tokens
    interval_s: float  #: from one long prompt to the next
    duration_s: float  #: of one measurement
    vocab_size: int
    seed: int

    def long_prompts(self, folder: Path, seed: int) -> list[ImagePrompt]:
        rng, count = random.Random(f"long {seed}"), max(1, round(self.duration_s / self.interval_s))
        if not self.image_side:
            return [ImagePrompt(random_ids(rng, self.prompt_len, self.vocab_size), []) for _ in range(count)]
        model, tokenizer = ModelConfig.from_folder(folder), ChatTokenizer.from_folder(folder)
        if model.vision is None:
            raise InvalidParameter("model", folder.name, "a model that reads images")
        processor = ImageProcessor.from_folder(folder, json.loads(model.vision.transformers), tokenizer)
        question = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
        text = tokenizer.render_chat_template([{"role": "user", "content": question}])
        files = [picture(self.image_side, rng.getrandbits(32)) for _ in range(count)]
        images = [processor.process(decode(file, "image", self.image_side**2), "image") for file in files]
        return [ImagePrompt(*processor.place(text, [image], model.max_position_embeddings)) for image in images]


@dataclass(slots=True)
class Setup:
    """One way to use the cores, and its latencies: one entry per repetition, in milliseconds."""

    name: str
    itl_p50_ms: list[float] = field(default_factory=list)
    itl_p99_ms: list[float] = field(default_factory=list)
    itl_max_ms: list[float] = field(default_factory=list)
    ttft_p50_ms: list[float] = field(default_factory=list)
    stream_tokens_per_s: list[float] = field(default_factory=list)
    remote_prompts: int = 0
    images_encoded: int = 0  #: by the engine that decodes

    def median(self, name: str) -> float:
        """Return the median over the repetitions."""
        return statistics.median(getattr(self, name))


@dataclass(frozen=True, slots=True)
class IsolationReport:
    model: str
    cores: int
    repetitions: int
    traffic: Traffic
    setups: list[Setup]

    @property
    def gain(self) -> float:
        """P99 time between tokens: the better of the shared engines over that of the two pools."""
        *shared, pools = (setup.median("itl_p99_ms") for setup in self.setups)
        return min(shared) / pools


def measure(
    *, model: str, traffic: Traffic, repetitions: int, chunk: int, progress: Progress, **options: Any
) -> IsolationReport:
    """Measure the setups in turn.

    model: a name or folder; empty for random weights, of the model that benchmarks/images.py makes. chunk: tokens per
    step of the second shared engine, which spares its streams by taking prompts in small pieces. options: of
    EngineConfig.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if len(cores) < 2:
        raise InvalidParameter("cores", len(cores), "at least 2, one for each pool")
    with tempfile.TemporaryDirectory() as made:
        name = Path(model).name or "random weights"
        if not model:
            model, options = make_model(Path(made)), {**options, "load_format": "dummy"}
        ways = setups_of(cores, traffic, chunk, EngineConfig(model=model, **options))
        folder = resolve(model, weights=False)
        setups = [Setup(name) for name in ways]
        bar = progress.add_task("isolation", total=repetitions * len(setups))
        for repetition in range(repetitions):
            prompts = traffic.long_prompts(folder, traffic.seed + repetition)
            for setup in setups:
                with Engines(ways[setup.name]) as engines:
                    asyncio.run(_run(engines, traffic, setup, prompts, seed=traffic.seed + repetition))
                    stats = engines.stats("decode")
                handoffs, images = stats.record(HandoffTotals) or HandoffTotals(), stats.record(ImageStats)
                setup.remote_prompts += sum(handoffs.prefill_decisions.get("remote", {}).values())
                setup.images_encoded += 0 if images is None else images.encoded
                progress.advance(bar)
    return IsolationReport(name, len(cores), repetitions, traffic, setups)


def setups_of(
    cores: Sequence[int], traffic: Traffic, chunk: int, config: EngineConfig
) -> dict[str, dict[str, tuple[EngineConfig, Sequence[int]]]]:
    """Return engines with their cores, by the name of the setup; the last has two pools."""
    config = replace(config, max_num_seqs=min(64, chunk))
    chunked = replace(config, max_num_batched_tokens=chunk)
    first, second = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    setups = {
        "one engine": {"decode": (config, cores)},
        f"one engine, {chunk} tokens per step": {"decode": (chunked, cores)},
    }
    if traffic.image_side:  # whose prompt is computed by the engine that decodes, in small pieces too
        setups["encode pool + decode pool"] = {
            "encode": (replace(config, handoff=HandoffConfig(role="encode")), first),
            "decode": (replace(chunked, encode=HandoffConfig(role="decode")), second),
        }
    else:
        setups["prefill pool + decode pool"] = {
            "prefill": (replace(config, handoff=HandoffConfig(role="prefill")), first),
            "decode": (replace(config, handoff=HandoffConfig(role="decode")), second),
        }
    return setups


async def _run(engines: Engines, traffic: Traffic, setup: Setup, prompts: Sequence[ImagePrompt], seed: int) -> None:
    client = Client(engines, traffic, seed)
    receiving = asyncio.create_task(client.receive())
    try:
        for _ in range(traffic.streams):
            client.add_stream()
        await client.until(lambda: len(client.arrivals) == traffic.streams, receiving)
        await asyncio.sleep(WARM_S)
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            await asyncio.sleep(max(0.0, began + i * traffic.interval_s - time.perf_counter()))
            client.add(f"long-{i}", prompt, output=LONG_OUTPUT)
        await client.until(lambda: all(f"long-{i}" in client.arrivals for i in range(len(prompts))), receiving)
        ended = time.perf_counter()
        streams = [[t for t in times if t >= began] for name, times in client.arrivals.items() if is_stream(name)]
        gaps_ms = [1000 * (b - a) for times in streams for a, b in pairwise(times)]
        ttft_ms = [1000 * (client.arrivals[f"long-{i}"][0] - client.sent[f"long-{i}"]) for i in range(len(prompts))]
        setup.itl_p50_ms.append(float(np.percentile(gaps_ms, 50)))
        setup.itl_p99_ms.append(float(np.percentile(gaps_ms, 99)))
        setup.itl_max_ms.append(max(gaps_ms))
        setup.ttft_p50_ms.append(float(np.percentile(ttft_ms, 50)))
        setup.stream_tokens_per_s.append(sum(map(len, streams)) / (ended - began))
    finally:
        receiving.cancel()
        client.close()


class Client:
    """Sends requests to the engine `decode`, and records the arrival times of tokens, by `time.perf_counter`."""

    def __init__(self, engines: Engines, traffic: Traffic, seed: int):
        self.sent: dict[str, float] = {}
        self.arrivals: dict[str, list[float]] = {}
        self._engine = engines["decode"]
        self._random = random.Random(seed)
        self._vocab_size = traffic.vocab_size
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._address = f"tcp://127.0.0.1:{self._inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self._received = asyncio.Event()

    def add(self, request_id: str, prompt: ImagePrompt, output: int | None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self.sent[request_id] = time.perf_counter()
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt.token_ids,
            params=params,
            reply_to=self._address,
        ).asking(PromptImages.of(prompt.mm_features))
        self._engine.send(Add(request))

    def add_stream(self) -> None:
        prompt = random_ids(self._random, STREAM_PROMPT, self._vocab_size)
        self.add(f"{STREAM}{len(self.sent)}", ImagePrompt(prompt, []), output=None)

    async def receive(self) -> None:
        """Receive until cancelled; start a new stream for each that has reached the model's limit. Raises EngineError
        if a request fails."""
        decode = msgspec.msgpack.Decoder(TokenBatch).decode
        while True:
            batch = decode(await self._inbox.recv())
            now = time.perf_counter()
            for delta in batch.deltas:
                if delta.error is not None:
                    raise EngineError(delta.request_id, delta.error.message)
                if delta.token_ids:
                    self.arrivals.setdefault(delta.request_id, []).append(now)
                if delta.finish_reason is not None and is_stream(delta.request_id):
                    self.add_stream()
            self._received.set()

    async def until(self, condition: Callable[[], bool], receiving: asyncio.Task[None]) -> None:
        """Wait for a condition. Raises the error of `receiving`, or TimeoutError."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not condition():
                self._received.clear()
                received = asyncio.create_task(self._received.wait())
                await asyncio.wait([received, receiving], return_when=asyncio.FIRST_COMPLETED)
                received.cancel()
                if receiving.done():
                    receiving.result()

    def close(self) -> None:
        self._context.destroy(linger=0)


def is_stream(request_id: str) -> bool:
    return request_id.startswith(STREAM)


def show_report(report: IsolationReport) -> None:
    table = make_table("", *(setup.name for setup in report.setups))
    rows = [
        ("time between tokens, ms: median", "itl_p50_ms", 1),
        ("P99", "itl_p99_ms", 1),
        ("longest", "itl_max_ms", 1),
        ("time to first token of a long prompt, ms", "ttft_p50_ms", 0),
        ("tokens/s of the running streams", "stream_tokens_per_s", 0),
    ]
    for name, key, decimals in rows:
        table.add_row(name, *(figure(setup.median(key), decimals) for setup in report.setups))
    traffic, last = report.traffic, report.setups[-1]
    long = (
        f"a question about a new image of {traffic.image_side} x {traffic.image_side} pixels"
        if traffic.image_side
        else f"a prompt of {traffic.prompt_len} tokens"
    )
    show(
        f"{report.model}, {report.cores} cores: {traffic.streams} streams, and {long} every {traffic.interval_s:g} s; "
        f"medians of {report.repetitions} repetitions of {traffic.duration_s:g} s",
        table,
        f"P99 time between tokens: the better of the shared engines takes {report.gain:.1f} times as long as two pools",
        f"with two pools the decode engine has encoded {last.images_encoded} images itself"
        if traffic.image_side
        else f"prompts that the decode engine had computed elsewhere: {last.remote_prompts}",
    )


def main(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or Hub id; default: the bundled one, or random weights if there are images."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run all the time.")] = 8,
    prompt_len: Annotated[int, typer.Option(min=2, help="Tokens of each long prompt.")] = 1500,
    image_side: Annotated[
        int, typer.Option(min=0, help="Ask about new square images of so many pixels in place of long prompts.")
    ] = 0,
    interval_s: Annotated[float, typer.Option(min=0.01, help="From the start of one long prompt to the next.")] = 1.0,
    duration_s: Annotated[float, typer.Option(min=1, help="Length of one measurement.")] = 10.0,
    chunk: Annotated[int, typer.Option(min=8, help="Tokens per step of the second shared engine.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=11, help="Token ids are below this; the model must have them.")] = 1000,
    seed: SeedOption = 0,
    repetitions: Annotated[int, typer.Option(min=1, help="Each with new prompts; the setups take turns.")] = 3,
    dtype: DtypeOption = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt + answer, in tokens.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the effect of long prompts, or of images, on running streams: one engine for both, against two pools.

    The same cores for all: one engine with all of them, or two engines with half of them each. The first token of a
    long prompt may come later from the pools, since only half of the cores compute it.

    Example: python -m benchmarks.isolation --streams 4 --prompt-len 1000
    """
    traffic = Traffic(
        streams=streams, prompt_len=prompt_len, image_side=image_side, interval_s=interval_s, duration_s=duration_s,
        vocab_size=vocab_size, seed=seed,
    )  # fmt: skip
    with progress_bar() as progress:
        report = measure(
            model=model or ("" if image_side else "pocket"), dtype=dtype, max_model_len=max_model_len, traffic=traffic,
            repetitions=repetitions, chunk=chunk, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(asdict(report) | {"gain": report.gain})
    else:
        show_report(report)


if __name__ == "__main__":
    run(main)
