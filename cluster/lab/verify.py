"""`manta verify`: recomputes a server's answer, and compares the two bit by bit.

The request passes through the code of the routes up to the point where an answer could be read from a store. An engine
in this process computes the answer instead. So every feature of a request is covered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from cluster.config.app_config import AppConfig
from cluster.config.ingress_section import IngressSection
from cluster.config.model_section import ModelSection
from cluster.fingerprint import differing_parts
from cluster.model_info import model_info
from cluster.serve_config import load, ours
from cluster.serve_flags import YAML, configuration
from deployments.frontend.sequence_context import SequenceContext
from deployments.http.bodies import Bodies
from deployments.http.context import RequestContext
from deployments.jobs.delta_log import DeltaLog, LoggedGeneration
from deployments.jobs.event_ids import NoEventIds
from deployments.jobs.source import LiveSource
from deployments.observability.telemetry import Telemetry
from deployments.openai.chat import ChatResponse
from deployments.openai.chat_body import ChatBody
from deployments.openai.completion_body import CompletionBody
from deployments.openai.served.served_model import ServedModel
from deployments.parts.table import model_parts, named, part_fields
from engine.config import EngineConfig
from engine.errors import InvalidParameter, RequestError
from engine.offline.llm import LLM
from engine.text.chat_tokenizer import ChatTokenizer
from engine.text.text_stream import TextStream
from engine.wire.generate_request import GenerateRequest

Json = dict[str, Any]
Step = tuple[int | None, str | None, float | None]
"""Id, name and log-probability of a token; each is None if the answer lacks it."""

ROUTES = {"chat.completion": "chat", "text_completion": "completion"}  # by the `object` field of answers
NOT_COMPARED = ("id", "created", "prompt_tokens_details", "accepted_prediction_tokens", "rejected_prediction_tokens")
"""Fields that differ in every computation of a request: ids, times, and counts of cached and drafted tokens."""
ADDED = ("logprobs", "token_ids", "prompt_token_ids")  # fields that the recomputation always requests
SHOWN, SHOWN_BEFORE = 60, 20  # characters shown of a differing text, and how many of them precede the difference

BODIES = Bodies("ignore", part_fields())


@dataclass(frozen=True, slots=True)
class Verdict:
    fingerprint: list[str]
    """Parts of `system_fingerprint` that differ from this machine's; if there are any, nothing was computed."""
    differences: list[str]
    """Description of the first difference in each choice and in each other field."""
    compared: str = ""
    """Description of what was compared, and what was left out."""


class ComparedAnswer(msgspec.Struct):
    """The fields of an answer on which the comparison depends."""

    class Usage(msgspec.Struct):
        prompt_tokens: int

    object: Literal["chat.completion", "text_completion"]
    system_fingerprint: str
    model: str
    choices: list[Json]
    usage: Usage


class Recomputation(LiveSource):
    """Source of an answer that an engine in this process computes."""

    started = True  # no work is refused

    def __init__(self, llm: LLM):
        self.created, self._llm = 0, llm

    def hex_id(self, name: str) -> str:
        return ""  # for ids of tool calls, which differ in every computation

    async def start(
        self, context: SequenceContext, prompts: list[list[GenerateRequest]], client: str, fingerprint: str | None
    ) -> LoggedGeneration:
        """Compute the answer. Raises RequestError if the tokens were drawn at random."""
        log = DeltaLog()
        for choice, request in enumerate(request for requests in prompts for request in requests):
            if request.params.seed is None and not request.params.greedy:
                raise InvalidParameter("seed", None, "given, or temperature 0: the tokens were sampled at random")
            text = TextStream(request.params, context.tokenizer)
            with closing(self._llm.deltas(msgspec.structs.replace(request, timeout_s=None))) as deltas:
                for delta in deltas:
                    log.add((choice, delta))
                    if text.add(delta).finish_reason is not None:  # possibly at a stop string
                        break
        log.end()
        return LoggedGeneration(context, prompts, log, NoEventIds())


def verify(answer_file: Path, request_file: Path, model: str) -> Verdict:
    """Recompute an answer and compare it. model: as for `manta serve`. Raises OSError, or ServingError if the answer
    cannot be recomputed."""
    answer, request = _read(answer_file), _read(request_file)
    incomplete = RequestError(f"{answer_file} is not a full answer of {' or '.join(ROUTES)} with a system_fingerprint")
    try:
        msgspec.convert(answer, ComparedAnswer)
    except msgspec.ValidationError:
        raise incomplete from None
    section, ingress = _find(model, answer["model"])
    info = named(model_info(section, ingress), answer["model"])
    assert info.fingerprint is not None
    if parts := differing_parts(answer["system_fingerprint"], info.fingerprint):
        return Verdict(parts, [])
    tokenizer = ChatTokenizer.from_folder(Path(info.folder), template=info.chat_template)
    no_engine: Any = SimpleNamespace(address="")
    served = ServedModel(info, tokenizer, no_engine, no_engine, Telemetry("verify"), parts=model_parts)
    with LLM(**_engine_options(section)) as llm:
        route = ROUTES[answer["object"]]
        again = asyncio.run(_compute(route, request, served, RequestContext("", 0, "", source=Recomputation(llm))))
    prompts = zip(_prompts(answer), _prompts(again), strict=False)
    if len(answer["choices"]) != len(again["choices"]) or any(one not in (None, other) for one, other in prompts):
        raise RequestError(f"{request_file} does not belong to the answer: its prompt or `n` differs")
    try:
        return Verdict([], differences(answer, again, tokenizer), _compared(answer))
    except (AttributeError, KeyError, TypeError):  # a part of a choice is malformed
        raise incomplete from None


def differences(answer: Json, again: Json, tokenizer: ChatTokenizer) -> list[str]:
    """Return the first difference in each choice and in each other field. again: the recomputed answer, with the same
    number of choices."""
    pairs = enumerate(zip(answer["choices"], again["choices"], strict=True))
    found = [_difference(i, *pair, tokenizer) for i, pair in pairs]
    names = sorted((answer.keys() | again.keys()) - {"choices", *NOT_COMPARED})
    found += [_other(name, answer, again) for name in names]
    return [difference for difference in found if difference is not None]


def _compared(answer: Json) -> str:
    first = answer["choices"][0] if answer["choices"] else {}
    found = "tokens and log-probabilities" if first.get("logprobs") else "tokens" if first.get("token_ids") else "text"
    return f"{found}, and all other fields; not compared: {', '.join(NOT_COMPARED)}"


async def _compute(route: str, request: Json, model: ServedModel, context: RequestContext) -> Json:
    """Return a complete response that includes everything that can be compared."""
    more: Json = {"stream": False, "stream_options": None, "return_token_ids": True, "prediction": None}
    if route == "chat":
        body = BODIES.parse(ChatBody, msgspec.json.encode(request | more | {"logprobs": True}))
        response = ChatResponse(body, context, await model.chat(body, context))
        return _as_sent(await response.full())
    more["logprobs"] = request.get("logprobs") or 0
    text_body = BODIES.parse(CompletionBody, msgspec.json.encode(request | more))
    return _as_sent(await (await model.completion(text_body, context)).full())


def _as_sent(response: msgspec.Struct) -> Json:
    """Return a response as clients receive it."""
    sent: Json = msgspec.json.decode(msgspec.json.encode(response))
    return sent


def _difference(index: int, choice: Json, again: Json, tokenizer: ChatTokenizer) -> str | None:
    """Return where two choices first differ. Tokens and log-probabilities that the answer has are compared first, then
    the other fields."""
    given, found = _steps(choice), _steps(again)
    if choice.get("logprobs") is None:  # those of an echoed prompt are not in the answer either
        found = found[len(found) - len(again["token_ids"]) :]
    for position, (one, other) in enumerate(itertools.zip_longest(given, found) if given else ()):
        if one is None or other is None or any(a is not None and a != b for a, b in zip(one, other, strict=True)):
            shown = " computed again ".join(_shown(step, tokenizer) for step in (one, other))
            return f"choice {index}, position {position}: {shown}"
    names = ["text", "message", *sorted(choice.keys() | again.keys())]
    return next((f"choice {index}: {other}" for name in names if (other := _other(name, choice, again))), None)


def _other(name: str, answer: Json, again: Json) -> str | None:
    """Return where a field first differs, or None."""
    if name in ADDED and answer.get(name) is None:
        return None
    one, other = (
        json.dumps(_comparable(each.get(name)), ensure_ascii=False, sort_keys=True) for each in (answer, again)
    )
    if one == other:
        return None
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    start, dots = (same - SHOWN_BEFORE, "...") if same > SHOWN_BEFORE else (0, "")
    cut = slice(start, same + SHOWN)
    return f"another {name}: {dots}{one[cut]}, computed again {dots}{other[cut]}"


def _steps(choice: Json) -> list[Step]:
    """Return the tokens of a choice. An echoed prompt has log-probabilities, but no ids."""
    logprobs: Json = choice.get("logprobs") or {}
    if "content" in logprobs:  # the format of chats
        names, values = ([entry[key] for entry in logprobs["content"] or ()] for key in ("token", "logprob"))
    else:
        names, values = logprobs.get("tokens", []), logprobs.get("token_logprobs", [])
    ids = choice.get("token_ids") or []
    size = max(len(ids), len(names))
    columns = ([None] * (size - len(column)) + column for column in (ids, names, values))
    return list(zip(*columns, strict=True))


def _shown(step: Step | None, tokenizer: ChatTokenizer) -> str:
    if step is None:
        return "the answer has ended,"
    token_id, name, logprob = step
    if name is None and token_id is not None:
        name = tokenizer.token_text(token_id)
    number = "" if token_id is None else f" ({token_id})"
    return f"{name!r}{number}" + (f" with log-probability {logprob!r}," if logprob is not None else ",")


def _prompts(answer: Json) -> list[Any]:
    """Return the fields of an answer that describe its prompts."""
    return [answer["usage"]["prompt_tokens"], *(each.get("prompt_token_ids") for each in (answer, *answer["choices"]))]


def _comparable(value: Any) -> Any:
    """Return JSON without NOT_COMPARED, and without empty fields, which some clients drop."""
    if isinstance(value, list):
        return [_comparable(each) for each in value]
    if isinstance(value, dict):
        kept = {key: _comparable(each) for key, each in value.items() if key not in NOT_COMPARED}
        return {key: each for key, each in kept.items() if each is not None and each != {}}
    return value


def _find(model: str, name: str | None) -> tuple[ModelSection, IngressSection]:
    """Return the model with this name, or the only one, and the ingress section."""
    config = load(Path(model)) if model.endswith(YAML) else configuration(model, {}, {})
    applications = [AppConfig.of(application) for _, application in ours(config)]
    found = [(section, application.ingress) for application in applications for section in application.models]
    named = [pair for pair in found if name in (pair[0].name, *pair[0].aliases, *_modules(pair[0]))] or found
    if len(named) > 1:
        raise RequestError(f"{model} has no model {name!r}; it has {', '.join(section.name for section, _ in found)}")
    return named[0]


def _modules(section: ModelSection) -> list[str]:
    return [module.name for module in section.lora_modules]


def _engine_options(section: ModelSection) -> Json:
    """Return options for an engine that computes the same bits as the model's replicas."""
    config = section.engine_config()
    options = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    options |= {
        "handoff": None,
        "encode": None,
        "speculative_config": None,
        "pipeline_parallel_size": 1,
        "pipeline_layers": None,
    }
    options["device"] = "cuda" if section.on_gpu("decode") else "cpu"
    if config.determinism == "strict":
        options |= {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_eplb": False}
        options |= {"all2all_backend": "auto"}
    return options


def _read(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{path} is not a JSON object")
    return value
