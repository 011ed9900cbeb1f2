"""Arguments of vLLM's `LLM` methods that Manta's do not have: each is ignored with a reason or refused by name."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

from engine.errors import RequestError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Argument:
    """Treatment of an argument of some methods."""

    name: str
    methods: str
    note: str
    """Why ignoring it is harmless, or the alternative of a refused one."""
    ignored: bool = False
    neutral: Sequence[Any] = (None, {}, [])
    """Values that ask for nothing."""


PROCESSED = "images are processed by the settings in the model's folder"
TOKENIZED = "use prompts of token ids, or PoolingParams(truncate_prompt_tokens=N) to shorten a text"
POOLS = "embed classify encode"
EVERY = f"generate chat score {POOLS}"
TABLE = (
    Argument("tokenization_kwargs", EVERY, TOKENIZED),
    Argument("mm_processor_kwargs", "generate chat", PROCESSED),
    Argument("prompt_token_ids", "generate", 'use prompts={"prompt_token_ids": [...]}'),
    Argument("guided_options_request", "generate", "use SamplingParams(structured_outputs=...)"),
    Argument("prompt_adapter_request", f"generate score {POOLS}", "use lora_request"),
    Argument(
        "chat_template_content_format",
        "chat",
        "templates get the form of content that they read",
        ignored=True,
        neutral=(None, "auto"),
    ),
    Argument("chat_template", "score", "the prompt of a reranker is read from the model's folder"),
    Argument("truncate_prompt_tokens", f"score {POOLS}", "use PoolingParams(truncate_prompt_tokens=N)"),
    Argument("progress", EVERY, "use use_tqdm", neutral=()),
)


METHODS = {  # vLLM's methods that LLM does not have, with the alternative
    "apply_model": "use forward hooks of transformers",
    "beam_search": "use generate with SamplingParams(n=N), and choose by cumulative_logprob",
    "collective_rpc": "ranks take no calls of users",
    "enqueue": "use generate, which takes any number of prompts",
    "get_metrics": "use stats()",
    "reset_mm_cache": "create a new LLM",
    "reward": "use encode with pooling_task='token_classify'",
    "set_tokenizer": "use LLM(tokenizer=...)",
    "sleep": "use close(), and create a new LLM",
    "start_profile": "use python -m benchmarks.step",
    "stop_profile": "use python -m benchmarks.step",
    "wait_for_completion": "use generate, which takes any number of prompts",
    "wake_up": "use close(), and create a new LLM",
}


def refuse_method(name: str) -> NoReturn:
    """Raise RequestError for a method of vLLM's LLM that is not supported, AttributeError for any other name."""
    if name in METHODS:
        raise RequestError(f"LLM.{name} is not supported: {METHODS[name]}", name)
    raise AttributeError(f"'LLM' object has no attribute {name!r}")


def named(method: Callable[P, T], where: str = "", table: Sequence[Argument] = TABLE) -> Callable[P, T]:
    """Return a method that treats keyword arguments that it does not have as the table says. It raises RequestError
    for one that is refused, and for one that neither vLLM nor Manta has. where: its name in errors."""
    where = where or f"LLM.{method.__name__}"
    parameters = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - parameters.keys():
            treat(where, name, kwargs.pop(name), table, list(parameters)[1:])
        return method(*args, **kwargs)

    return call


def treat(where: str, name: str, value: Any, table: Sequence[Argument], known: Sequence[str]) -> None:
    """Log why an argument is ignored, or raise RequestError. known: arguments to name in the error about an unknown
    one."""
    method = where.rpartition(".")[2]
    row = next((row for row in table if row.name == name and method in row.methods.split()), None)
    if row is None:
        raise RequestError(f"{where} has no argument {name!r}; it has {', '.join(known)}", name)
    if any(value is neutral or value == neutral for neutral in row.neutral):
        return
    if not row.ignored:
        raise RequestError(f"{name} of {where} is not supported: {row.note}", name)
    logger.warning("%s of %s is ignored: %s", name, where, row.note)
