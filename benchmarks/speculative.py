"""What speculative decoding gains and costs: one stream and many, with and without it, in turns in one process.

What a model writes decides what drafts are worth, and models with random weights write nothing. So the texts are given:
every step computes the model and samples as ever, and the token of the text then takes the place of the sampled one.
Drafts are accepted where a model that writes this text would accept them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.command import DtypeOption, JsonOption, ModelOption, SeedOption, print_json, run
from cluster.flags import json_object
from cluster.terminal.tables import figure, make_table, show
from engine.assembly.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.model.checkpoint.resolve import resolve
from engine.options.section import parse_section
from engine.options.speculation import SpeculativeConfig
from engine.text.chat_tokenizer import ChatTokenizer
from engine.wire.generate_request import GenerateRequest
from engine.wire.parts.speculation import SpecDecodeStats
from engine.wire.sampling_params import SamplingParams
from engine.wire.structured_outputs import StructuredOutputsParams

ROOT = Path(__file__).parent.parent
CODE = ROOT / "engine" / "core" / "block_pool.py"
PAGE = ROOT / "docs" / "handoff.md"
RENAMED = {"block": "page", "num_free": "free_pages", "watermark": "reserve"}  # the edit that is asked for
COMMON_TOKENS = 100  # of which the hard text is made: what follows two of them has been seen before, and differs
MANY = 64
PROMPT_TOKENS = 1000
SCHEMA = {
    "type": "object",
    "properties": {
        "nationality": {"enum": ["danish", "dutch"]},
        "occupation": {"enum": ["baker", "miller"]},
        "has_children": {"type": "boolean"},
        "preferred_language": {"enum": ["english", "german"]},
    },
    "required": ["nationality", "occupation", "has_children", "preferred_language"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    prompts: list[list[int]]
    answers: list[list[int]] | None
    """None where the model writes them itself."""
    params: SamplingParams | None = None
    """None for greedy ones, as long as the answer."""


@dataclass(frozen=True, slots=True)
class Report:
    """Medians over the repetitions."""

    load: str
    streams: int
    output_tokens: int
    drafted: int
    accepted: int
    steps: int
    seconds_without: float
    seconds_with: float
    cpu_without: float  #: seconds of all threads
    cpu_with: float
    speedup: float  #: median of the quotients of neighbouring runs
    cpu_speedup: float


def loads(tokenizer: ChatTokenizer, rng: random.Random, output_tokens: int) -> Iterator[Load]:
    code, page = CODE.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")
    edited = code
    for old, new in RENAMED.items():
        edited = edited.replace(old, new)
    paragraphs = [part.replace("\n", " ") for part in page.split("\n\n") if part[:1].isalpha()]
    summary = " ".join(paragraph.split(". ")[0] + "." for paragraph in paragraphs)

    def text(name: str, prompt: str, answer: str) -> Load:
        tokens = tokenizer.encode(prompt)[:PROMPT_TOKENS] + tokenizer.encode(f"\n\n{name}:\n\n")
        return Load(name, [tokens], [tokenizer.encode(answer)[:output_tokens]])

    def hard(streams: int) -> Load:
        prompts = [rng.choices(range(10, 10 + COMMON_TOKENS), k=64) for _ in range(streams)]
        answers = [rng.choices(range(10, 10 + COMMON_TOKENS), k=output_tokens) for _ in range(streams)]
        return Load(f"random text, {streams} streams" if streams > 1 else "random text", prompts, answers)

    edit = text("code editing", code, edited)
    yield edit
    yield text("summary of a page", " ".join(paragraphs), summary)
    yield hard(1)
    yield hard(MANY)
    assert edit.answers is not None
    prompts = [[i + 10, *edit.prompts[0][:500]] for i in range(MANY)]
    yield Load(f"code editing, {MANY} streams", prompts, edit.answers * MANY)
    form = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    yield Load("JSON schema", [tokenizer.encode(f"A person {i}:") for i in range(4)], None, form)


class Bench:
    """Two engines of one model, one of them with speculative decoding."""

    def __init__(self, config: EngineConfig, speculative: SpeculativeConfig):
        self.cores = [build_engine(replace(config, speculative_config=chosen)) for chosen in (None, speculative)]

    def close(self) -> None:
        for core in self.cores:
            core.close()

    def measure(self, load: Load, repetitions: int) -> Report:
        """Alternate the engines; the first run of each warms it up."""
        times: list[list[tuple[float, float]]] = [[], []]
        drafted = accepted = steps = tokens = 0
        for repetition in range(repetitions + 1):
            for core, own in zip(self.cores, times, strict=True):
                before = core.stats()
                seconds = self._run(core, load, str(repetition))
                after = core.stats()
                if repetition:
                    own.append(seconds)
                earlier, later = before.record(SpecDecodeStats), after.record(SpecDecodeStats)
                if earlier and later:
                    drafted = later.num_draft_tokens - earlier.num_draft_tokens
                    accepted = later.num_accepted_tokens - earlier.num_accepted_tokens
                    steps, tokens = after.steps - before.steps, after.generation_tokens - before.generation_tokens
        (wall, cpu), (wall_with, cpu_with) = ([list(column) for column in zip(*own, strict=True)] for own in times)

        def quotient(without: list[float], with_: list[float]) -> float:
            return statistics.median(a / b for a, b in zip(without, with_, strict=True))

        return Report(
            load.name, len(load.prompts), tokens, drafted, accepted, steps, statistics.median(wall),
            statistics.median(wall_with), statistics.median(cpu), statistics.median(cpu_with),
            quotient(wall, wall_with), quotient(cpu, cpu_with),
        )  # fmt: skip

    def _run(self, core: EngineCore, load: Load, name: str) -> tuple[float, float]:
        """Return seconds, and CPU seconds, from the first token of the last stream on to the end."""
        core.scheduler.kv_cache.pool.clear_cache()
        for i, prompt in enumerate(load.prompts):
            params = load.params
            if params is None:
                assert load.answers is not None
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(load.answers[i]))
            core.add(GenerateRequest(request_id=f"{name}-{i}", prompt=prompt, params=params))
        with given_texts(core, load):
            waiting = {f"{name}-{i}" for i in range(len(load.prompts))}
            while waiting:
                waiting -= {event.delta.request_id for event in core.step() if event.delta.token_ids}
            started = time.perf_counter(), time.process_time()
            while core.has_work:
                for event in core.step():
                    assert event.delta.error is None, event.delta.error
            return time.perf_counter() - started[0], time.process_time() - started[1]


@contextmanager
def given_texts(core: EngineCore, load: Load) -> Iterator[None]:
    """Let every step end with the tokens of the answers in place of those that it sampled."""
    if load.answers is None:
        yield
        return
    runner, whole = core.ranks.runner, {}
    answers = dict(zip(map(tuple, load.prompts), load.answers, strict=True))
    sample: Callable = runner._sample

    def given(hidden: torch.Tensor, inputs):  # type: ignore[no-untyped-def]
        _, logprobs = sample(hidden, inputs)
        for new in inputs.plan.added:
            whole[new.slot] = new.tokens + answers[tuple(new.tokens)] + [0] * 64
        places = (divmod(place, runner.max_model_len) for place in inputs.written.tolist())
        return torch.tensor([whole[slot][position] for slot, position in places], dtype=torch.int64), logprobs

    runner._sample = given  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner._sample


def show_reports(reports: list[Report]) -> None:
    table = make_table(
        "", "tokens", "drafted", "accepted", "tokens/step", "without, s", "with, s", "times", "CPU times"
    )
    for r in reports:
        table.add_row(
            r.load, str(r.output_tokens), str(r.drafted), f"{r.accepted / r.drafted:.0%}" if r.drafted else "",
            f"{r.output_tokens / r.steps / r.streams:.2f}", figure(r.seconds_without, 2), figure(r.seconds_with, 2),
            f"{r.speedup:.2f}", f"{r.cpu_speedup:.2f}",
        )  # fmt: skip
    show("Speculative decoding, from the first token to the last", table)


def main(
    model: ModelOption = "pocket",
    dtype: DtypeOption = "auto",
    speculative_config: Annotated[str, typer.Option(help="As for `manta serve`.")] = '{"method": "ngram"}',
    output_tokens: Annotated[int, typer.Option(min=16, help="Of each stream.")] = 400,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each load, with and without in turns.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: the engine's.")] = None,
    only: Annotated[str, typer.Option(help="Loads whose name has this in it.")] = "",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure one stream and 64 with speculative decoding, beside the same without.

    Texts are given, so that drafts fare as with a model that writes them; `JSON schema` is the model's own text, in
    which the schema forces most tokens.
    """
    config = EngineConfig(
        model=model, dtype=dtype, num_threads=threads, max_num_seqs=MANY, max_model_len=2048,  # type: ignore[arg-type]
        kv_cache_memory_bytes=2**31,
    )  # fmt: skip
    folder = resolve(model)
    bench = Bench(config, parse_section(SpeculativeConfig, "speculative_config", json_object(speculative_config)))
    tokenizer = ChatTokenizer.from_folder(folder)
    chosen = [load for load in loads(tokenizer, random.Random(seed), output_tokens) if only in load.name]
    try:
        reports = [bench.measure(load, repetitions) for load in chosen]
    finally:
        bench.close()
    if as_json:
        print_json({"model": model, "loads": [asdict(report) for report in reports]})
    else:
        show_reports(reports)


if __name__ == "__main__":
    run(main)
