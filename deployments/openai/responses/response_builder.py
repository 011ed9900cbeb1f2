"""Builds a response, and the events of its growth, from the model's output."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from deployments.http.errors import error_body
from deployments.openai.chat_output import ChatOutput, ChatOutputChunk, tool_call_id
from deployments.openai.parsers.output_parser import CallArguments, CallStart, Content, Reasoning
from deployments.openai.response_bodies import ChatTokenLogprob, CostFields, FinishReason, HoldBody, NumericsBorder
from deployments.openai.responses.items import SENT_REASONING
from deployments.openai.responses.request_body import ResponsesBody
from deployments.openai.responses.response_body import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    ErrorCode,
    ErrorEvent,
    FunctionToolCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Part,
    ReasoningDelta,
    ReasoningDone,
    ReasoningOutput,
    ReasoningText,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
    StreamEvent,
    TextDelta,
    TextDone,
)

Event = TypeVar("Event", bound=StreamEvent)
Item = TypeVar("Item", OutputMessage, ReasoningOutput)


class ResponseBuilder:
    """Runs the generation of a response once, through `events`."""

    def __init__(self, body: ResponsesBody, response: Response, output: ChatOutput):
        self.response = response
        self.error: Exception | None = None
        """Why the response has failed."""
        self._output = output
        self._functions, self._sends_reasoning = body.functions, body.with_sent_reasoning
        self._background = body.background
        self._logprobs: list[ChatTokenLogprob] = []  # of tokens whose text is still held back
        self._part: Part = OutputText()  # part of the current item, if it has one
        self._num_events = 0

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """Yield all events; the last is a ResponseEnd.

        The first event is yielded with the first output. An error before that is raised, so that a refused request gets
        its own HTTP status. A background response no longer has an HTTP request, so all its errors become events.
        """
        response, started = self.response, self._background
        if started:
            yield self._event(ResponseCreated, response=response)
            yield self._event(ResponseQueued, response=response)
        finish_reason: FinishReason | None = None
        try:
            async with aclosing(self._output.chunks()) as chunks:
                async for chunk in chunks:
                    if response.status == "queued":
                        response.status = "in_progress"
                        if not started:
                            started = True
                            yield self._event(ResponseCreated, response=response)
                        yield self._event(ResponseInProgress, response=response)
                    for event in self._add(chunk):
                        yield event
                    finish_reason = chunk.finish_reason
        except Exception as error:
            if not started:
                raise
            self.error = error
        for event in self._close("completed" if finish_reason in ("stop", "tool_calls") else "incomplete"):
            yield event
        for event in self._end(finish_reason):
            yield event

    def _add(self, chunk: ChatOutputChunk) -> Iterator[StreamEvent]:
        self._logprobs += chunk.logprobs
        for event in chunk.events:
            match event:
                case Content(text):
                    yield from self._open(OutputMessage, "msg", OutputText())
                    yield self._add_text(text)
                case Reasoning(text):
                    yield from self._open(ReasoningOutput, "rs", ReasoningText())
                    self._part.text += text
                    yield self._item_event(ReasoningDelta, delta=text)
                case CallStart(name, call_id):
                    yield from self._close("completed")
                    yield from self._start(self._call(name, call_id or tool_call_id()))
                case CallArguments(text):
                    call = self.response.output[-1]
                    assert isinstance(call, FunctionToolCall)
                    call.arguments += text
                    yield self._item_event(ArgumentsDelta, delta=text)
        if chunk.events:
            self._logprobs = []
        if chunk.finish_reason is not None and not self.response.output:
            yield from self._open(OutputMessage, "msg", OutputText())

    def _open(self, kind: type[Item], prefix: str, part: Any) -> Iterator[StreamEvent]:
        """Start an item with one part, unless the current item is of this kind."""
        if isinstance(self._live, kind):
            return
        yield from self._close("completed")
        item = kind(self._item_id(prefix))
        yield from self._start(item)
        item.content, self._part = [part], part
        yield self._item_event(ContentPartAdded, part=part)

    def _start(self, item: OutputItem) -> Iterator[StreamEvent]:
        self.response.output.append(item)
        yield self._event(OutputItemAdded, output_index=len(self.response.output) - 1, item=item)

    def _add_text(self, text: str) -> StreamEvent:
        part, logprobs = self._part, self._logprobs
        assert isinstance(part, OutputText)
        part.text += text
        part.logprobs += logprobs
        self._logprobs = []
        return self._item_event(TextDelta, delta=text, logprobs=logprobs)

    def _call(self, name: str, call_id: str) -> FunctionToolCall:
        function = self._functions.get(name)
        call = FunctionToolCall(self._item_id("fc"), call_id, name if function is None else function.name)
        if function is not None and function.namespace is not None:
            call.namespace = function.namespace
        return call

    def _close(self, status: ItemStatus) -> Iterator[StreamEvent]:
        """End the current item, if there is one."""
        item = self._live
        if item is None:
            return
        item.status = status
        match item:
            case FunctionToolCall():
                yield self._item_event(ArgumentsDone, name=item.name, arguments=item.arguments)
            case OutputMessage(content=[part]):
                yield self._item_event(TextDone, text=part.text, logprobs=part.logprobs)
                yield self._item_event(ContentPartDone, part=part)
            case ReasoningOutput(content=[part]):
                if self._sends_reasoning:
                    item.encrypted_content = SENT_REASONING + part.text
                yield self._item_event(ReasoningDone, text=part.text)
                yield self._item_event(ContentPartDone, part=part)
        yield self._event(OutputItemDone, output_index=len(self.response.output) - 1, item=item)

    def _end(self, finish_reason: FinishReason | None) -> Iterator[StreamEvent]:
        response, usage = self.response, self._output.usage
        cost = CostFields.of(usage, asked=self._output.reports_cost)
        response.completed_at = int(time.time())
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, usage.held_tokens()),
            usage.completion_tokens,
            OutputTokensDetails(self._output.reasoning_tokens or 0),
            usage.prompt_tokens + usage.completion_tokens,
            HoldBody.all_of(usage),
            cost.cost,
            cost.details,
            NumericsBorder.all_of(usage),
        )
        if self.error is not None:
            status, body = error_body(self.error)
            code: ErrorCode = "server_error"
            if status in (400, 402, 429):
                code = "invalid_prompt" if status == 400 else "rate_limit_exceeded"
            response.status, response.error = "failed", ResponseError(code, body.error.message)
            yield self._event(ErrorEvent, code=code, message=body.error.message, param=body.error.param)
            yield self._event(ResponseFailed, response=response)
        elif finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails()
            yield self._event(ResponseIncomplete, response=response)
        else:
            response.status = "completed"
            yield self._event(ResponseCompleted, response=response)

    @property
    def _live(self) -> OutputItem | None:
        """The item that is still growing, or None."""
        last = self.response.output[-1] if self.response.output else None
        return last if last is not None and last.status == "in_progress" else None

    def _item_id(self, prefix: str) -> str:
        """Return an id that contains the response's id, so that references to the item can be resolved."""
        return f"{prefix}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    def _item_event(self, kind: type[Event], **fields: Any) -> Event:
        output = self.response.output
        return self._event(kind, output_index=len(output) - 1, item_id=output[-1].id, **fields)

    def _event(self, kind: type[Event], **fields: Any) -> Event:
        self._num_events += 1
        return kind(sequence_number=self._num_events - 1, **fields)
