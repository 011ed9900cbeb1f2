"""Errors that a user or another process may see, in one tree. Those of the HTTP server are in deployments/errors.py,
those of adapters in engine/lora/errors.py.

ServingError
├── RequestError              400  the request itself is wrong
│   ├── InvalidParameter      400  one field has a bad value: names field, value and limit
│   ├── UnsupportedTask       400  the model cannot do what is asked of it, such as generate or embed
│   └── PromptTooLong         400  prompt does not fit the model's context (code: context_length_exceeded)
├── Overloaded                429  queues are full; nothing was started
├── RequestTimeout            408  the request's own deadline passed
├── EngineError               500  computing this request failed; the engine continues
├── EngineUnavailable         503  the replica died or makes no progress; a retry elsewhere can help
├── Moved                     503  the replica lets another one go on with the request
├── OtherModel                503  the replica runs another model than this request is for
└── StartupError              (exit code 1) the engine cannot start as configured
    ├── ConfigError                one key of the configuration is wrong
    ├── ModelFolderError           folder missing, or without what a model needs
    ├── UnsupportedArchitecture    says what the architecture needs and what is missing
    ├── OutOfMemory                too little memory, with the numbers and what to change
    └── RendezvousTimeout          ranks of one model did not find each other: names the missing ones

Each error has its HTTP status, its OpenAI error `type`, and whether a retry in another replica could help. Constructor
arguments equal `args`, so that errors pickle between processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar


class ServingError(Exception):
    """Root of the tree. Raise only its leaves."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    param: str | None = None

    @property
    def code(self) -> str:
        """Stable machine-readable name, such as `invalid_parameter`."""
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class RequestError(ServingError):
    """The request cannot be served as it is. Sending it again will not help."""

    status, type = 400, "invalid_request_error"

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message, param)
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class Described(str):
    """A description that errors show, without quotes, instead of a value that would tell less."""

    __slots__ = ()
    __repr__ = str.__str__


class InvalidParameter(RequestError):
    def __init__(self, field: str, value: object, limit: str):
        if isinstance(value, str) and not isinstance(value, Described):
            value = _head(value)  # it may be millions of characters long, and errors are sent and printed
        try:
            shown = repr(value if isinstance(value, Described) else _head(value))
        except ValueError:  # Python refuses to print integers of thousands of digits
            value = shown = "a number of thousands of digits"
        if len(shown) > 100:
            shown = shown[:100] + "…"
        Exception.__init__(self, field, shown if not isinstance(value, (int, float, str)) else value, limit)
        self.message, self.param = f"{field} must be {limit}, got {shown}", field
        self.field, self.value, self.limit = field, value, limit


def _head(value: object) -> object:
    """Return the beginning of `value` for a message, since printing a whole list may take long."""
    match value:
        case str():
            return value[:100]
        case list():
            return [_head(entry) for entry in value[:50]]
        case dict():
            return {key: _head(entry) for key, entry in islice(value.items(), 50)}
        case _:
            return value


class UnsupportedTask(RequestError):
    def __init__(self, task: str, supported: list[str], model: str = "this model"):
        Exception.__init__(self, task, supported, model)
        self.message, self.param = f"{model} cannot do {task!r}; it can do: {', '.join(supported)}", "model"


class PromptTooLong(RequestError):
    """The prompt, with one token of the answer if there is to be one, exceeds the limit."""

    def __init__(self, tokens: int, limit: int, estimated: bool = False, answer: bool = True, prompt: str = "prompt"):
        """estimated: whether `tokens` is only a lower bound. answer: whether output tokens will follow. prompt: field
        of the prompt."""
        Exception.__init__(self, tokens, limit, estimated, answer, prompt)
        self.param = prompt.partition("[")[0]
        # clients know this error by its code, or by "prompt is too long: N tokens > M" (Claude Code, LangChain), or by
        # "this model's maximum context length is" (litellm)
        counted = "counted no further; " if estimated else ""
        self.message = (
            f"{prompt} is too long: {tokens} tokens > {limit - answer} maximum "
            f"({counted}this model's maximum context length is {limit} tokens"
            + (", and the answer needs at least one)" if answer else "; truncate_prompt_tokens can shorten it)")
        )

    @property
    def code(self) -> str:
        return "context_length_exceeded"


class Overloaded(ServingError):
    status, type, retryable = 429, "rate_limit_error", True

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message, retry_after_s)
        self.message, self.retry_after_s = message, retry_after_s

    def __str__(self) -> str:
        return self.message


class RequestTimeout(ServingError):
    status, type = 408, "timeout_error"

    def __init__(self, request_id: str, waited_s: float):
        super().__init__(request_id, waited_s)

    def __str__(self) -> str:
        return f"request {self.args[0]} was not finished within its deadline of {self.args[1]:.1f} s"


class EngineError(ServingError):
    def __init__(self, request_id: str, reason: str):
        super().__init__(request_id, reason)

    def __str__(self) -> str:
        return f"request {self.args[0]} failed in the engine: {self.args[1]}"


class EngineUnavailable(ServingError):
    status, type, retryable = 503, "service_unavailable_error", True

    doing: Sequence[str] = ()

    def __init__(self, reason: str, doing: Sequence[str] = ()):
        """doing: what the engine was doing when it ended by itself: keys of its black box (engine/black_box.py).
        Nothing if it was ended from outside, or if nobody knows."""
        super().__init__(reason, doing)
        self.doing = doing

    def __str__(self) -> str:
        return str(self.args[0])


class Moved(ServingError):
    """The replica is about to stop, or has no room, and lets another replica continue the request."""

    status, type, retryable = 503, "service_unavailable_error", True

    def __init__(self, request_id: str):
        super().__init__(request_id)

    def __str__(self) -> str:
        return f"request {self.args[0]} continues in another replica"


class OtherModel(ServingError):
    """The replica serves another model under the same name, because one model is being replaced by the other.

    weights, vocabulary: ModelIdentity of the replica that refused.
    """

    status, type, retryable = 503, "service_unavailable_error", True

    def __init__(self, request_id: str, weights: str, vocabulary: str):
        super().__init__(request_id, weights, vocabulary)
        self.weights, self.vocabulary = weights, vocabulary

    def __str__(self) -> str:
        return f"the model that request {self.args[0]} needs has been replaced by another model"


class StartupError(ServingError):
    """The engine cannot start as configured; the message says what to change."""


CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+(?=@)|(?<=[?&]password=)[^&#\s]+")  # in a URL; a password may contain @


def without_credentials(value: Any) -> Any:
    """Return JSON without the user names and passwords in its URLs."""
    if isinstance(value, dict):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_credentials(inner) for inner in value]
    return CREDENTIALS.sub("***", value) if isinstance(value, str) and not isinstance(value, Described) else value


MAX_LINE = 2000  # characters of a message that quotes a file


def _cut(message: str) -> str:
    return message if len(message) <= MAX_LINE else message[:MAX_LINE] + "…"


class ConfigError(StartupError):
    def __init__(self, key: str, value: object, limit: str):
        super().__init__(key, value, limit)

    def __str__(self) -> str:
        return _cut(f"configuration: {self.args[0]} must be {self.args[2]}, got {without_credentials(self.args[1])!r}")


class ModelFolderError(StartupError):
    def __init__(self, path: str, problem: str):
        super().__init__(path, problem)

    def __str__(self) -> str:
        return _cut(f"model {self.args[0]!r}: {self.args[1]}")


class UnsupportedArchitecture(StartupError):
    """Neither a native family nor transformers' own code can compute the model's architecture; the message says why."""

    def __init__(self, architecture: str, reason: str):
        super().__init__(architecture, reason)

    def __str__(self) -> str:
        return f"architecture {self.args[0]!r} is not supported: {self.args[1]}"


class OutOfMemory(StartupError):
    """The KV cache would not fit, or a cache is too small for a single request."""

    def __init__(self, message: str):
        super().__init__(message)


class RendezvousTimeout(StartupError):
    def __init__(self, missing: list[int], size: int, timeout_s: float, where: str):
        super().__init__(missing, size, timeout_s, where)

    def __str__(self) -> str:
        missing, size, timeout_s, where = self.args
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"{ranks} of {size} did not join the rendezvous within {timeout_s:.0f} s ({where})"
