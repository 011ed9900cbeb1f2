"""`manta chat`: a conversation with a server, in a terminal or through pipes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console

from cluster.cli.bench.openai_client import OpenAIClient, StreamFailed
from cluster.terminal.printable import printable
from engine.errors import EngineUnavailable, RequestError

TIMEOUT_S = 3600.0
COMMANDS = """\
/clear          forget the conversation
/system TEXT    begin with this system message; without a text, with none
/help           this
A line that ends with \\ continues in the next. Ctrl-C stops an answer, Ctrl-D ends."""


@dataclass(slots=True)
class ChatAnswer:
    """An answer as far as it has arrived. Times are seconds since the question."""

    text: str = ""
    id: str = ""  #: the server's id of the answer
    tokens: int | None = None
    first_s: float | None = None
    seconds: float = 0.0

    @property
    def figures(self) -> str:
        """The token counts and times that are known, on one line."""
        parts = [] if self.tokens is None else [f"{self.tokens} token" + "s" * (self.tokens != 1)]
        if self.first_s is not None:
            if self.tokens is not None and self.tokens > 1 and self.seconds > self.first_s:
                parts.append(f"{(self.tokens - 1) / (self.seconds - self.first_s):.1f} tokens/s")
            parts.append(f"the first after {self.first_s:.2f} s")
        return ", ".join([*parts, *([self.id] if self.id else [])])


@dataclass(slots=True)
class Conversation:
    client: OpenAIClient
    model: str
    options: dict[str, Any] = field(default_factory=dict)  #: fields of each request besides its messages
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)  #: without the system message

    async def ask(self, question: str, answer: ChatAnswer) -> AsyncGenerator[tuple[str, bool]]:
        """Yield pieces of the answer's text, each with whether it is reasoning. `answer` grows with them.

        An answer that the caller interrupts stays in the conversation; one that fails does not, and neither does its
        question. Raises EngineUnavailable with the server's message.
        """
        asked, asked_at = {"role": "user", "content": question}, time.monotonic()
        try:
            async for chunk in self.client.chunks("/v1/chat/completions", self._body(asked)):
                now = time.monotonic() - asked_at
                answer.id, answer.seconds = chunk.id or answer.id, now
                if chunk.usage is not None and chunk.usage.completion_tokens is not None:
                    answer.tokens = chunk.usage.completion_tokens
                for delta in (choice.delta for choice in chunk.choices if choice.delta is not None):
                    for text, reasoning in ((delta.thought, True), (delta.content, False)):
                        if text:
                            answer.first_s = now if answer.first_s is None else answer.first_s
                            answer.text += "" if reasoning else text
                            yield text, reasoning
        except StreamFailed as error:
            raise EngineUnavailable(str(error)) from error
        except (asyncio.CancelledError, GeneratorExit):
            self._answered(asked, answer)
            raise
        self._answered(asked, answer)

    def _answered(self, asked: dict[str, str], answer: ChatAnswer) -> None:
        self.messages += [asked, {"role": "assistant", "content": answer.text}]

    def _body(self, asked: dict[str, str]) -> bytes:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(
            {"model": self.model, "messages": [*system, *self.messages, asked], **stream, **self.options}
        )


def chat(url: str, model: str | None, system: str | None, api_key: str | None, options: dict[str, Any]) -> None:
    """Chat until stdin ends; if stdin is not a terminal, it is a single question. options: as in Conversation.

    Raises EngineUnavailable, InvalidApiKey, or RequestError.
    """
    with asyncio.Runner() as runner:
        client = runner.run(OpenAIClient(url, api_key, TIMEOUT_S).__aenter__())
        try:
            names = runner.run(client.models())
            if model is None and not names:
                raise RequestError(f"{client.base_url} does not list its models; give --model", "model")
            conversation = Conversation(client, model or names[0], options, system)
            if sys.stdin.isatty():
                _converse(runner, conversation)
            else:
                runner.run(_answer_once(conversation, sys.stdin.read()))
        finally:
            runner.run(client.__aexit__())


async def _answer_once(conversation: Conversation, question: str) -> None:
    """Write the answer, and nothing else, to stdout as it arrives."""
    if not question.strip():
        raise RequestError("stdin contains no question", "question")
    async for text, reasoning in conversation.ask(question.strip(), ChatAnswer()):
        if not reasoning:
            print(text, end="", flush=True)
    print()


def _converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  gives `input` a history and editing

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{conversation.model} at {conversation.client.base_url}; /help lists commands", style="dim")
    while True:
        try:
            line = _read()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if line.startswith("/"):
            _command(line, conversation, console)
        elif line:
            answer = ChatAnswer()
            try:
                runner.run(_show(conversation, line, answer, console))
            except KeyboardInterrupt:
                console.print("\n(stopped)", style="dim")
            except EngineUnavailable as error:
                console.print(f"\n{printable(str(error))}", style="red")
                continue
            console.print(answer.figures, style="dim")


def _read() -> str:
    line = input("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('… ')}"
    return line.strip()


async def _show(conversation: Conversation, question: str, answer: ChatAnswer, console: Console) -> None:
    reasons = False
    async for text, reasoning in conversation.ask(question, answer):
        if reasons and not reasoning:
            console.print("\n")
        reasons = reasoning
        console.print(printable(text), end="", style="dim" if reasoning else None, soft_wrap=True)
    console.print()


def _command(line: str, conversation: Conversation, console: Console) -> None:
    name, _, rest = line.partition(" ")
    match name:
        case "/clear":
            conversation.messages.clear()
        case "/system":
            conversation.system = rest.strip() or None
            conversation.messages.clear()
        case "/help":
            console.print(COMMANDS, style="dim")
        case _:
            console.print(f"unknown command {printable(name)}\n{COMMANDS}", style="dim")
