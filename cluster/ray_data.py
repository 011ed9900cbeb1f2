"""Batch inference in Ray Data: an engine in each actor of a `map_batches`, with the names of `ray.data.llm`."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cluster.ray_serve_llm import engine_keys
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError, ServingError, StartupError
from engine.wire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

    from engine.offline.outputs import RequestOutput

Row = dict[str, Any]
MapRow = Callable[[Row], Row]
RowResult = Row | Exception
Done = Callable[[RowResult], object]

ERROR = "__inference_error__"  # same column as in ray.data.llm
PROMPTS = ("messages", "prompt", "tokenized_prompt")
MAX_CONCURRENT_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorConfig:
    """Options of a processor. Names shared with `ray.data.llm.vLLMEngineProcessorConfig` have the same meaning."""

    model_source: str = "pocket"  #: a Hugging Face model folder or a Hub id
    engine_kwargs: Mapping[str, Any] = field(
        default_factory=dict
    )  #: of vLLM's engine (docs/vllm.md), or fields of EngineConfig
    task_type: Literal["generate", "embed"] = "generate"
    batch_size: int = 32  #: rows per batch
    concurrency: int | tuple[int, int] = 1  #: maximum number of engines, or (minimum, maximum)
    max_concurrent_batches: int = MAX_CONCURRENT_BATCHES  #: batches per engine at a time, for `generate`
    num_cpus: float = 1.0  #: CPUs of each engine
    num_gpus: float = 0.0  #: GPUs of each engine; with `tensor_parallel_size`, one per rank
    accelerator_type: str | None = None  #: GPU that an engine needs, as Ray names it: L4, H100
    id_column: str | None = None
    """Column that identifies rows. With it, a row has the same seed in any engine at any time. Without it, only rows
    with temperature 0 or their own seed give the same text again."""
    should_continue_on_error: bool = False
    """Whether to continue after a row that cannot be answered. The row then bypasses `postprocess`, and the column
    `__inference_error__` has its error. If False, the error ends the job."""


class Processor:
    """Maps a dataset to a dataset with answers; see `build_processor`."""

    def __init__(self, config: ProcessorConfig, preprocess: MapRow | None, postprocess: MapRow | None):
        self.config, self._preprocess, self._postprocess = config, preprocess, postprocess

    def __call__(self, dataset: Dataset) -> Dataset:
        """Return the dataset with its answers, which are computed when the result is read or written."""
        from ray.data import ActorPoolStrategy

        config = self.config
        low, high = (1, config.concurrency) if isinstance(config.concurrency, int) else config.concurrency
        side_by_side = config.max_concurrent_batches if config.task_type == "generate" else 1
        return dataset.map_batches(
            {"generate": _Generate, "embed": _Embed}[config.task_type],
            fn_constructor_args=(config, self._preprocess or _same, self._postprocess or _same),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(min_size=low, max_size=high, max_concurrent_calls_per_actor=side_by_side),
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus or None,
            accelerator_type=config.accelerator_type,
        )


def build_processor(
    config: ProcessorConfig, preprocess: MapRow | None = None, postprocess: MapRow | None = None
) -> Processor:
    """Return a processor; call it with a dataset. The result keeps all columns.

    preprocess: maps a row to one with `messages` of a chat, or a text `prompt`, or its token ids as `tokenized_prompt`.
    `sampling_params` in the same row is a dict of fields of SamplingParams. postprocess: maps that row, with
    `generated_text`, `generated_tokens`, `num_input_tokens`, `num_generated_tokens` and `finish_reason`, or with
    `embeddings`, to the row of the result. Both functions run in the engine's process. Raises StartupError if Ray Data
    is not installed or an option is not available.
    """
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise StartupError(f"Ray Data needs more packages ({error}): pip install 'manta-serve[data]'") from None
    _engine_options(config)
    return Processor(config, preprocess, postprocess)


def _engine_options(config: ProcessorConfig) -> dict[str, Any]:
    """Return the fields of EngineConfig that `engine_kwargs` correspond to. Raises ConfigError."""
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    given = dict(config.engine_kwargs)
    keys = engine_keys({name: given.pop(name) for name in given.keys() - fields}, "engine_kwargs")
    options = {**keys.pop("engine", {}), **given}
    for name, value in keys.items():
        raise ConfigError(f"engine_kwargs.{name}", value, "an engine option that needs no server")
    EngineConfig(model=config.model_source, **options)
    return options


def _same(row: Row) -> Row:
    return row


class _Engine:
    """Base class of the actors for both tasks. An actor keeps its engine, and computes batches of rows."""

    def __init__(self, config: ProcessorConfig, preprocess: MapRow, postprocess: MapRow):
        from engine.offline.llm import LLM

        self.config, self._preprocess, self._postprocess = config, preprocess, postprocess
        self.llm = LLM(config.model_source, **_engine_options(config))

    def rows(self, batch: Any) -> list[Row]:
        """Return the preprocessed rows of a batch, a pyarrow table."""
        return [self._preprocess(row) for row in batch.to_pylist()]

    def columns(self, rows: list[Row], answers: list[RowResult]) -> dict[str, list[Any]]:
        """Return the rows with their answers, as columns. Raises the first error, unless `should_continue_on_error` is
        set."""
        found: list[Row] = []
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(answer, Exception):
                if not self.config.should_continue_on_error or isinstance(answer, RuntimeError):
                    raise answer
                found.append({**row, ERROR: str(answer)})
            else:
                found.append(self._postprocess({**row, **answer}))
                if self.config.should_continue_on_error:
                    found[-1][ERROR] = ""
        names = dict.fromkeys(name for row in found for name in row)
        return {name: [row.get(name) for row in found] for name in names}


class _Embed(_Engine):
    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        rows = self.rows(batch)
        return self.columns(rows, self._embeddings([_prompt(row) for row in rows]))

    def _embeddings(self, prompts: list[Any]) -> list[RowResult]:
        try:
            outputs = self.llm.embed(prompts, use_tqdm=False)
        except RequestError as error:  # raised before any of them is computed
            return [error] if len(prompts) == 1 else [self._embeddings([prompt])[0] for prompt in prompts]
        return [{"embeddings": o.outputs.embedding, "num_input_tokens": len(o.prompt_token_ids)} for o in outputs]


class _Generate(_Engine):
    """Actor that generates. Several batches use its engine concurrently, so that the engine stays busy while a batch
    ends."""

    def __init__(self, config: ProcessorConfig, preprocess: MapRow, postprocess: MapRow):
        super().__init__(config, preprocess, postprocess)
        self._inbox: SimpleQueue[tuple[Row, Done]] = SimpleQueue()
        self._open: dict[str, Done] = {}
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, batch: Any) -> AsyncIterator[dict[str, list[Any]]]:
        rows, loop = self.rows(batch), asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        for row, future in zip(rows, futures, strict=True):
            self._inbox.put((row, partial(_set_result, loop, future)))
        answers = asyncio.gather(*futures)
        while not answers.done():
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(asyncio.to_thread(self._run))
            either: list[asyncio.Future[Any]] = [answers, self._running]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        yield self.columns(rows, answers.result())

    def _run(self) -> None:
        """Answer rows until none are left, in the only thread that uses the engine."""
        try:
            for output in self.llm.run(self, use_tqdm=False):
                self._open.pop(output.request_id)(_answer(output))
        except Exception as error:  # noqa: BLE001  a step has failed: raised where answers are awaited
            for done in self._open.values():
                done(RuntimeError(f"the engine has failed: {error!r}"))
            self._open.clear()

    def __iter__(self) -> _Generate:
        return self

    def __next__(self) -> tuple[RequestOutput, SamplingParams]:
        """Return the next request. StopIteration means only that no request is waiting now: running requests continue,
        and others may follow."""
        while True:
            try:
                row, done = self._inbox.get_nowait()
            except Empty:
                raise StopIteration from None
            try:
                request, params = self.request(row)
                if request.request_id in self._open:
                    raise RequestError(f"two rows have the same {self.config.id_column}: {request.request_id}")
            except (ServingError, msgspec.ValidationError) as error:
                done(error)
                continue
            self._open[request.request_id] = done
            return request, params

    def request(self, row: Row) -> tuple[RequestOutput, SamplingParams]:
        """Return the request of a row. Raises RequestError, or msgspec's ValidationError."""
        given = {name: value for name, value in (row.get("sampling_params") or {}).items() if value is not None}
        params = msgspec.convert({"max_tokens": None, **given}, SamplingParams)
        prompt = _prompt(row)
        if row.get("messages") is not None:
            prompt = self.llm.tokenizer.apply_chat_template(prompt)
        name = uuid.uuid4().hex if self.config.id_column is None else f"row {row.get(self.config.id_column)}"
        return self.llm.request(prompt, params, request_id=name), params


def _set_result(loop: asyncio.AbstractEventLoop, future: asyncio.Future[RowResult], answer: RowResult) -> None:
    loop.call_soon_threadsafe(future.set_result, answer)


def _prompt(row: Row) -> Any:
    """Return the prompt of a row. Raises RequestError."""
    given = [name for name in PROMPTS if row.get(name) is not None]
    if len(given) != 1:
        raise RequestError(f"a row needs one of {', '.join(PROMPTS)}, and has {', '.join(given) or 'none'}", "prompt")
    if given[0] == "messages":  # Arrow adds the keys of all dicts to each of them
        return [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]
    return row[given[0]]


def _answer(output: RequestOutput) -> RowResult:
    first = output.outputs[0]
    if first.error:
        return RequestError(first.error)
    return {
        "generated_text": first.text,
        "generated_tokens": first.token_ids,
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(first.token_ids),
        "finish_reason": first.finish_reason,
    }
