"""Runs a pair of parts in one engine, and compares each request of a batch with the same request alone."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.costs.step_cost import LinearCost
from engine.errors import ConfigError, InvalidParameter, RequestError, ServingError
from engine.model.config import ModelConfig
from engine.model.expert_parallel import check_experts
from engine.model.stage import check_stages
from engine.options.handoff import HandoffConfig
from engine.parts.kv_fetching.kv_fetching import KVFetching
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.composition.engines import Answer, Asked, Openers, Session
from tests.composition.models import KINDS, Kind, Models
from tests.composition.parts import Draft, Part, Run, Setup, pool
from tests.fake_drafter import draft_always

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 80,
    "num_threads": 1,
    "tape_mib": 0,
    "max_held_share": 0.0,
}
HANDOFF = {"role": "replica", "transport": "tcp", "move_requests": False}
ROOM = {"recurrent": {"num_gpu_blocks_override": 1000}}
"""By attention: a state of a tiny model takes as much memory as the KV of hundreds of tokens."""
# options that decide bits, and so those of the engine that answers one request at a time
ARITHMETIC = ("model", "dtype", "quantization", "kv_cache_dtype", "determinism", "enable_lora", "max_loras")
LAYOUT = (  # only without `determinism`
    "tensor_parallel_size", "enable_expert_parallel", "data_parallel_size", "enable_eplb", "eplb_config",
)  # fmt: skip
MOST_OPEN = 4  # sessions that wait for the next pair with the same options
PREFIX = [3 + 11 * i * i % 80 for i in range(40)]
PROMPTS = [
    [*PREFIX, 30, 31, 32],
    [*PREFIX, 40, 41, 42, 43, 44, 45, 46, 47, 48],
    [50, 51, 52],
    [*PREFIX[:13], *[9, 9, 12] * 6],
    [3 + 7 * i % 80 for i in range(31)],
]
"""For requests with neither part, the first, the second, both, and both again."""
ON = ((), (0,), (1,), (0, 1), (0, 1))
AGAIN = (1, 3, 4)  # those that a second round asks for
REFUSALS = (ConfigError, RequestError)
FLOOD = 4  # prompts that evict what is cached


@dataclass(frozen=True)
class Outcome:
    """What came of a pair: `equal`; `refused` or `exclusive`, with a reason; `unequal`, with the fields that differ; or
    `without effect`, of a part alone."""

    kind: str
    reason: str = ""

    @property
    def has_place(self) -> bool:
        """Whether the table has a cell for it."""
        return self.kind in ("equal", "refused", "exclusive")


@dataclass
class Opened:
    session: Session
    stack: ExitStack


class Pairs:
    """Runs pairs, and keeps engines open that others use too."""

    def __init__(self, root: Path):
        self.models, self._root, self._openers = Models(root), root, Openers()
        self._patch = pytest.MonkeyPatch()
        self._open: dict[Any, Opened] = {}
        self._alone: dict[Any, Answer] = {}
        draft_always(self._patch)
        fetch_always(self._patch)
        self._patch.setattr("engine.serving.endpoint.STATUS_PERIOD_S", 0.02)

    def close(self) -> None:
        self.end_engines()
        self._openers.close()
        self._patch.undo()

    def end_engines(self) -> None:
        while self._open:
            self._end(next(iter(self._open)))

    def run(self, first: Part, second: Part) -> Outcome:
        """second: possibly the first itself, which then is on alone."""
        parts = (first, second) if first is not second else (first,)
        try:
            kind = kind_of(parts)
            return self._run(parts, kind, self._options(parts, kind))
        except Exclusive as error:
            return Outcome("exclusive", str(error))
        except REFUSALS as error:
            return Outcome("refused", reason_of(error))

    def _run(self, parts: Sequence[Part], kind: Kind, options: dict[str, Any]) -> Outcome:
        """Raises one of REFUSALS if an engine refuses a part, or a request."""
        rounds = [requests_of(parts, self.models, kind, again=False)]
        if any(part.twice for part in parts):
            rounds.append(requests_of(parts, self.models, kind, again=True))
        session = self._session(parts, options)
        before, streams = session.stats(), session.ask(rounds[0])
        if any(part.evicts for part in parts):
            session.ask([flooding(i) for i in range(FLOOD)])
        for requests in rounds[1:]:
            streams |= session.ask(requests, again=True)
        run = Run(before, session.stats(), streams)
        different: dict[str, list[str]] = {}
        for asked in chain.from_iterable(rounds):
            name = asked.message.request_id
            answer = streams[name].answer
            if answer.error is not None and answer.error.type == RequestError.type:
                return Outcome("refused", f"{answer.error.code}: {answer.error.message}")
            if found := answer.differs(self._answer_alone(asked, options)):
                different[name] = found
        for part in parts:
            part.audit(session)
        session.forget()
        if parts[1:] == () and not parts[0].worked(run):
            return Outcome("without effect")
        return Outcome("unequal", str(different)) if different else Outcome("equal")

    def _options(self, parts: Sequence[Part], kind: Kind) -> dict[str, Any]:
        setup = Setup(self.models, kind, Path(tempfile.mkdtemp(dir=self._root)))
        options: dict[str, Any] = {"model": str(self.models.folder(kind))}
        for part in parts:
            for key, value in (part.options(setup) if callable(part.options) else part.options).items():
                options[key] = merged(key, options.get(key, value), value)
        for part in parts:
            for key, value in part.most.items():
                options[key] = min(value, options.get(key, value))
        options = BASE | ROOM.get(kind.attention, {}) | options
        if "handoff" in options:
            options["handoff"] = HandoffConfig(**HANDOFF | options["handoff"])
        config = EngineConfig(**options)
        model = ModelConfig.from_folder(Path(config.model))
        model.kv_heads_per_rank(config.tensor_parallel_size)
        check_stages(config, model)
        check_experts(config, model)
        return options

    def _session(self, parts: Sequence[Part], options: dict[str, Any]) -> Session:
        key = (options["model"], *(part.name for part in parts if part.shapes_engine))
        if any(part.fresh for part in parts):
            self._end(key)
        return self._kept(key, options)

    def _kept(self, key: Any, options: dict[str, Any]) -> Session:
        if key in self._open:
            self._open[key] = self._open.pop(key)  # the newest
        else:
            while len(self._open) >= MOST_OPEN:
                self._end(next(iter(self._open)))
            stack = ExitStack()
            self._open[key] = Opened(stack.enter_context(self._openers.open(EngineConfig(**options))), stack)
        return self._open[key].session

    def _end(self, key: Any) -> None:
        if (opened := self._open.pop(key, None)) is not None:
            opened.stack.close()

    def _answer_alone(self, asked: Asked, options: dict[str, Any]) -> Answer:
        """The answer of an engine that does nothing else, caches nothing and has only what decides bits."""
        keys = ARITHMETIC if options.get("determinism") == "strict" else ARITHMETIC + LAYOUT
        own = {key: options[key] for key in keys if key in options}
        key = ("alone", *own.items())
        known = (key, msgspec.msgpack.encode(asked.message), asked.abort_after)
        if known not in self._alone:
            session = self._kept(key, BASE | own | {"enable_prefix_caching": False})
            (stream,) = session.ask([asked]).values()
            self._alone[known] = stream.answer
        return self._alone[known]


def fetch_always(patch: pytest.MonkeyPatch) -> None:
    """Let engines load and fetch what tiers and other engines have, however little it is and fast to compute."""
    patch.setattr(LinearCost, "of", lambda cost, units: 0.0)
    patch.setitem(KVFetching.__init__.__kwdefaults__, "min_tokens", 1)


class Exclusive(Exception):
    """Two parts are two values of one thing."""


def merged(key: str, value: Any, other: Any) -> Any:
    """Return the value of an option to which two parts may have given one. Keys of an object may be from both."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value | {part: merged(key, value.get(part, own), own) for part, own in other.items()}
    if value != other:
        raise Exclusive(f"two values of `{key}`")
    return value


def kind_of(parts: Sequence[Part]) -> Kind:
    """Return the kind of model for some parts."""
    needed: dict[str, Any] = {}
    for part in parts:
        for key, value in part.kind.items():
            if needed.setdefault(key, value) != value:
                raise Exclusive("two kinds of attention")
    kind = Kind(**needed)
    if replace(kind, wide=False) not in KINDS:
        raise Exclusive("no family of models has both")
    return kind


def requests_of(parts: Sequence[Part], models: Models, kind: Kind, again: bool) -> list[Asked]:
    """Return the requests of a round. Those of the second continue prompts of the first."""
    asked = []
    for number in AGAIN if again else range(len(PROMPTS)):
        prompt, on = PROMPTS[number], ON[number]
        params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        asked_again = again and number < len(PROMPTS) - 1  # but for the last, which is the same again
        draft = Draft(number, models, kind, [*prompt, 60, 61] if asked_again else list(prompt), params)
        if kind.bidirectional:
            pool(draft)
        for part in [parts[i] for i in on if i < len(parts)]:
            if part.ask is not None:
                part.ask(draft)
        whole = SamplingParams(**draft.params)
        for index in range(whole.n):
            name = f"{number}{' again' if again else ''} {index}"
            fields = {**draft.fields, "params": whole.sequence(index)}
            message = GenerateRequest(request_id=name, prompt=draft.prompt, **fields).asking(*draft.records)
            asked.append(Asked(message, draft.abort_after))
    return asked


def flooding(number: int) -> Asked:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = random.Random(number).choices(range(3, 90), k=70)
    return Asked(GenerateRequest(request_id=f"flood {number}", prompt=prompt, params=params))


def reason_of(error: ServingError) -> str:
    """Return the type of an error and what it says, without values that differ from run to run."""
    match error:
        case ConfigError():
            return f"{type(error).__name__}: `{error.args[0]}` must be {error.args[2]}"
        case InvalidParameter():
            return f"{type(error).__name__}: `{error.field}` must be {error.limit}"
    return f"{type(error).__name__}: {error}"
