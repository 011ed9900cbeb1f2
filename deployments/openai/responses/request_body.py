"""Body of POST /v1/responses, and its conversion to a chat request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, PrivateAttr, StringConstraints

from deployments.frontend.sequence import ReportedError
from deployments.http.body import MAX_FIELDS, StrictModel, Whole, validated
from deployments.http.validation import ForeignFields
from deployments.openai.chat_body import ChatBody
from deployments.openai.conversation import FunctionDefinition, TemplateModel
from deployments.openai.foreign_fields import FOREIGN_FIELDS
from deployments.openai.responses.items import Item, function_name, invalid, parsed, to_messages
from deployments.openai.sampling_body import SamplingBody
from deployments.openai.template_body import MAX_MESSAGES, MAX_TOOLS
from engine.errors import InvalidParameter, RequestError, ServingError
from engine.multimodal.invalid_image import InvalidImage
from engine.wire.sampling_params import MAX_LOGPROBS

SEARCH = re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?")
Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CHAT_SCHEMA = "response_format.json_schema.schema"
# names of chat request fields in errors, and their names here
RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    CHAT_SCHEMA: "text.format.schema",
}
SHARED_FOREIGN_FIELDS = (
    "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "moderation", "vllm_xargs",
)  # fmt: skip
RESPONSES_FOREIGN_FIELDS = ForeignFields(
    unused={
        "client_metadata": "only Codex itself uses it",
        "max_tool_calls": "it limits built-in tools, which this server does not have",
    },
    ignored={
        "access_programs": "the server has no access programs",
        "context_management": "the server does not compact conversations",
        "enable_response_messages": "use `GET /v1/responses/{id}/input_items` to see the input",
        "image": "send images as parts of messages",
        **{name: FOREIGN_FIELDS.ignored[name] for name in SHARED_FOREIGN_FIELDS},
    },
    refused={
        "chat_template": FOREIGN_FIELDS.refused["chat_template"],
        "conversation": "use previous_response_id, or send the items of the conversation",
        "previous_input_messages": "send the items of the conversation as input",
        "prompt": "this server keeps no prompt templates; send the text as input or instructions",
    },
)


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Has no effect: a response always follows its schema."""


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect: it is not passed to the model."""


class ReasoningConfig(TemplateModel):
    effort: Effort | None = None
    """A variable of the chat template; `none` also sets `enable_thinking` to false."""


class NamespaceTool(TemplateModel):
    name: str
    tools: list[Item] = Field(max_length=MAX_TOOLS)


class FunctionChoice(TemplateModel):
    name: str
    namespace: str | None = None


class AllowedTools(TemplateModel):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    path: str
    """Path of the function in the request, for errors."""
    name: str
    namespace: str | None
    definition: FunctionDefinition

    @property
    def full_name(self) -> str:
        """Name under which the model knows the function."""
        return function_name(self.name, self.namespace)

    def for_chat(self) -> dict[str, Any]:
        function = {key: value for key, value in self.definition.for_template().items() if key != "type"}
        return {"type": "function", "function": {**function, "name": self.full_name}}


class ResponsesBody(SamplingBody):
    """POST /v1/responses"""

    foreign_fields = RESPONSES_FOREIGN_FIELDS

    input: str | list[Item]
    """A user's text, or the items of a conversation."""
    instructions: str | None = None
    """First system message. It replaces the instructions of earlier responses."""
    previous_response_id: str | None = Field(default=None, max_length=256)
    """Id of the stored response that this one continues."""
    store: bool = True
    background: bool = False
    """Whether to answer at once, and compute the response even if the client leaves. Requires `store`."""
    max_output_tokens: Whole | None = None
    tools: list[Item] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    """False keeps only the first call of a response."""
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: list[Include] = Field(default=[], max_length=32)
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Only with `message.output_text.logprobs` in `include`."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto` cuts off the beginning of a prompt that does not fit, as `truncate_prompt_tokens: -1` does."""
    metadata: dict[
        Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]
    ] = Field(default={}, max_length=16)
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, for instance `enable_thinking`."""
    _functions: list[OfferedFunction] = PrivateAttr(default_factory=list)

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def with_sent_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include

    @property
    def functions(self) -> dict[str, OfferedFunction]:
        """Offered functions, by the names under which the model knows them."""
        return {function.full_name: function for function in self._functions}

    def check(self) -> None:
        super().check()
        if not self.input:
            raise InvalidParameter("input", self.input, "a text or a list of items that is not empty")
        if len(self.items) > MAX_MESSAGES:
            raise InvalidParameter("input", len(self.items), f"a list of at most {MAX_MESSAGES} items")
        if self.background and not self.store:
            raise InvalidParameter("background", True, "false with store=false: it could never be retrieved")
        unknown = self.reasoning.model_extra or {}
        if len(unknown) > MAX_FIELDS:
            raise InvalidParameter("reasoning", len(unknown), f"an object of at most {MAX_FIELDS} unknown fields")
        self._functions = list(self._find_functions(self.tools, "tools"))
        settings = {
            "request_id": self.request_id is not None,
            "text.verbosity": self.text.verbosity in ("low", "high"),
            "top_logprobs": bool(self.top_logprobs) and not self.with_logprobs,
            **{f"reasoning.{name}": value is not None for name, value in unknown.items()},
        }
        self.ignored.extend(name for name, given in settings.items() if given)

    def to_chat(self, items: list[Item], num_earlier: int, kind: type[ChatBody]) -> ChatBody:
        """Return the chat request. Raises RequestError.

        items: the whole conversation, with references resolved. num_earlier: number of items from earlier responses.
        kind: class of the chat.
        """
        choice, functions = self._tool_choice()
        fields = {name: getattr(self, name) for name in kind.model_fields if name in self.model_fields_set}
        fields |= {
            "messages": to_messages(items, self.instructions, num_earlier),
            "tools": [function.for_chat() for function in functions] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else self.truncate_prompt_tokens,
        }
        chat = validated(kind, fields)
        chat.check()
        return chat

    def all_ignored(self, ignored: list[str]) -> list[str]:
        """Return the fields that had no effect, with chat fields under their names in this API."""
        return list(dict.fromkeys([*self.ignored, *(RENAMED.get(name, name) for name in ignored)]))

    def renamed(self, error: RequestError | ReportedError) -> ServingError:
        """Return an error of the chat request, with fields under their names in this API."""
        if isinstance(error, ReportedError):
            message = error.info.message
            if message.startswith(CHAT_SCHEMA):
                message = RENAMED[CHAT_SCHEMA] + message.removeprefix(CHAT_SCHEMA)
            param = RENAMED.get(error.info.param or "", error.info.param)
            return ReportedError(msgspec.structs.replace(error.info, message=message, param=param))
        if not isinstance(error, InvalidParameter) or isinstance(error, InvalidImage):
            error.param = RENAMED.get(error.param or "", error.param)
            return error
        field = RENAMED.get(error.field, error.field)
        if match := re.match(r"tools\[(\d+)\](\.function)?", field):
            field = self._tool_choice()[1][int(match[1])].path + field[match.end() :]
        return invalid(field, error.value, error.limit)

    def _find_functions(self, tools: list[Item], path: str, namespace: str | None = None) -> list[OfferedFunction]:
        found = []
        for i, tool in enumerate(tools):
            here, kind = f"{path}[{i}]", tool.get("type")
            if kind == "function":
                definition = parsed(FunctionDefinition, tool, here)
                found.append(OfferedFunction(here, definition.name, namespace, definition))
            elif kind == "namespace" and namespace is None:
                inner = parsed(NamespaceTool, tool, here)
                found += self._find_functions(inner.tools, f"{here}.tools", inner.name)
            elif isinstance(kind, str) and SEARCH.fullmatch(kind):
                self.ignored.append(f"{path}.{kind}")
            else:
                raise invalid(f"{here}.type", kind, "function, because this server has no tools of its own")
        return found

    def _tool_choice(self) -> tuple[str | dict[str, Any] | None, list[OfferedFunction]]:
        """Return the choice in the form of chat requests, and the functions that the model may call."""
        choice, functions = self.tool_choice, self._functions
        if not isinstance(choice, dict):
            return choice, functions
        match choice.get("type"):
            case "function":
                named = parsed(FunctionChoice, choice, "tool_choice")
                name = function_name(named.name, named.namespace)
                return {"type": "function", "function": {"name": name}}, functions
            case "allowed_tools":
                allowed = parsed(AllowedTools, choice, "tool_choice")
                names = {function_name(tool.name, tool.namespace) for tool in allowed.tools}
                return allowed.mode, [function for function in functions if function.full_name in names]
            case other:
                raise invalid("tool_choice.type", other, "function or allowed_tools")

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format
        if wanted is None or wanted.type != "json_schema":
            return None if wanted is None else {"type": wanted.type}
        if wanted.content is None:
            raise RequestError("text.format.schema is required", "text")
        return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.content}}


class RetrieveQuery(BaseModel):
    """GET /v1/responses/{name}"""

    stream: bool = False
    """Only for a background response that was created as a stream."""
    starting_after: int = Field(default=-1, ge=0)
    """Sequence number of the last event that the client has."""
    include: list[str] | None = None
    include_obfuscation: bool | None = None


class InputItemsQuery(BaseModel):
    """GET /v1/responses/{name}/input_items"""

    after: str | None = None
    """Last id of the previous page."""
    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
