"""Finds out what a chat template writes of a conversation, and renders conversations so that it writes all of them.

When a template is loaded it renders short conversations of marked texts: what is not in the prompt, it does not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import jinja2
from jinja2.sandbox import SecurityError

from engine.errors import RequestError
from engine.text.chat_template import MAX_CPU_S, render
from engine.text.conversation import INSTRUCTIONS, Message, Reads, adapted, texts, with_texts

REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
MAX_REASON = 500  # characters of what a chat template says
TOOL = {
    "type": "function",
    "function": {
        "name": "example_function",
        "description": "An example.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": []},
    },
}
logger = logging.getLogger(__name__)


def render_all(
    source: str,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    special_tokens: dict[str, str],
    variables: dict[str, Any],
) -> str:
    """Return the prompt of a conversation. variables: of the template, besides its special tokens.

    What the template does not write, or refuses, is merged into another message or gets another role. Raises
    RequestError if it refuses even that, or still leaves out the text of a message.
    """
    reads, ends = reading(source, tuple(special_tokens.items())), _deadline()
    variables = {**special_tokens, **variables}
    problem: RequestError | None = None
    tried: list[list[Message]] = []
    for each in _stricter(reads):
        if (found := adapted(messages, each)) in tried or (tried and time.thread_time() > ends):
            continue
        tried.append(found)
        try:
            prompt = render(source, found, tools, **variables)
            left_out = _left_out(source, messages, tools, each, variables, prompt)
        except SecurityError as error:
            raise _refusal(error) from error
        except REFUSALS as error:
            problem = problem or _refusal(error)
            continue
        if left_out is None:
            return prompt
        role = messages[left_out]["role"]
        text = f"the model's chat template leaves out the text of messages[{left_out}], whose role is {role}"
        problem = problem or RequestError(text, "messages")
    assert problem is not None
    raise problem


def render_as_is(
    source: str, messages: list[Message], tools: list[dict[str, Any]] | None, special_tokens: dict[str, str]
) -> str:
    """Return what the template itself writes of messages and calls; empty if it refuses them."""
    reads = replace(reading(source, tuple(special_tokens.items())), calls=True, tool=True)
    try:
        return render(source, adapted(messages, reads), tools, **special_tokens, add_generation_prompt=False)
    except REFUSALS:
        return ""


def _refusal(error: Exception) -> RequestError:
    reason = " ".join(str(error).split())[:MAX_REASON]
    return RequestError(f"the model's chat template refuses the messages: {reason}", "messages")


def _deadline() -> float:
    return time.thread_time() + MAX_CPU_S


def _stricter(reads: Reads) -> Iterator[Reads]:
    """Yield what to try in turn: what was found, then the plainest conversations, at last without instructions."""
    yield reads
    if reads.known:
        nothing: frozenset[Any] = frozenset()
        beside: Literal["split", "moved"] = "split" if reads.beside_calls == "kept" else reads.beside_calls
        reads = replace(reads, pairs=nothing, late=nothing, opens=False, own_turns=False)
        reads = replace(reads, beside_calls=beside, any_arguments=False)
        yield reads
        yield replace(reads, repeats=nothing)
        yield replace(reads, repeats=nothing, first=nothing)


def _left_out(
    source: str, messages: list[Message], tools: Any, reads: Reads, variables: dict[str, Any], prompt: str
) -> int | None:
    """Return the index of the first message of which a text is not in the prompt; None if all are.

    A template may write a text otherwise (trimmed, as JSON, without its reasoning). So what is not found is looked for
    once more, as a mark in its place.
    """
    if all(text.strip() in prompt for message in messages for text in texts(message)):
        return None
    marks = [[_mark(i, j) for j, _ in enumerate(texts(message))] for i, message in enumerate(messages)]
    marked = [with_texts(message, iter(own)) for message, own in zip(messages, marks, strict=True)]
    try:
        prompt = render(source, adapted(marked, reads), tools, **variables)
    except REFUSALS:
        return None  # it looks into the texts; then it has decided what to write of them
    return next((i for i, own in enumerate(marks) if any(mark not in prompt for mark in own)), None)


def _mark(i: int, j: int = 0) -> str:
    return f"marked{i}x{j}text"


@lru_cache(64)
def reading(source: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> Reads:
    """Return what a template writes, and log it."""
    try:
        reads = _Probes(source, dict(special_tokens)).reads()
    except SecurityError:
        reads = Reads(known=False)
    if not reads.known:
        logger.info("chat template reads=unknown")
        return reads
    logger.info(
        "chat template instructions=%s late=%s parts=%s tools=%s arguments=%s",
        *(",".join(sorted(found)) or "none" for found in (reads.first, reads.late, reads.parts)),
        ",".join(name for name, found in (("calls", reads.calls), ("results", reads.tool)) if found) or "none",
        "text" if reads.text_arguments else "object",
    )
    return reads


class _Probes:
    """Renders conversations of marked texts."""

    def __init__(self, source: str, variables: dict[str, str]):
        self._source, self._variables, self._ends = source, variables, _deadline()

    def reads(self) -> Reads:
        turns = ["user", "assistant", "user"]
        forms = [frozenset(), frozenset(["user"]), frozenset(["assistant"]), frozenset(["user", "assistant"])]
        found = max((Reads(parts=form) for form in forms), key=lambda reads: len(self._written(reads, turns)))
        if not self._written(found, ["user"]):
            return Reads(known=False)
        found = self._with_instructions(found)
        twice = {"user": ["user", "user", "assistant"], "assistant": ["user", "assistant", "assistant", "user"]}
        repeats = frozenset(role for role, roles in twice.items() if self._writes(found, roles))
        return self._with_tools(replace(found, repeats=repeats, opens=self._writes(found, ["assistant", "user"])))

    def _with_instructions(self, reads: Reads) -> Reads:
        first: list[str] = []
        for role in INSTRUCTIONS:
            if role == "developer" and role not in self._source:
                continue  # a role that the template does not know, even if it writes any
            for parts in (reads.parts, reads.parts | {role}):
                if self._writes(replace(reads, parts=parts), [role, "user"]):
                    first.append(role)
                    reads = replace(reads, parts=parts)
                    break
        reads = replace(reads, first=frozenset(first))
        pairs = frozenset((a, b) for a, b in product(first, repeat=2) if self._writes(reads, [a, b, "user"]))
        late = frozenset(role for role in first if all(self._writes(reads, turns) for turns in (
            ["user", "assistant", role, "user"], [first[0], "user", "assistant", role, "user"], ["user", role]
        )))  # fmt: skip
        return replace(reads, pairs=pairs, late=late)

    def _with_tools(self, reads: Reads) -> Reads:
        def rated(choice: Reads) -> tuple[int, bool]:
            prompt = self._prompt(choice, _called()) or ""
            found = sum(mark in prompt for mark in ("markedname", "markedvalue", _mark(2)))
            return found, "{'key': 'markedvalue'}" not in prompt  # as Python writes an object

        choices = [replace(reads, text_arguments=text, parts=parts)
                   for parts in (reads.parts, reads.parts | {"tool"}) for text in (False, True)]  # fmt: skip
        reads = max(choices, key=rated)
        prompt, alone = self._prompt(reads, _called()) or "", self._prompt(reads, _called()[:2]) or ""
        calls = all(mark in prompt or mark in alone for mark in ("markedname", "markedvalue"))
        reads = replace(reads, calls=calls, tool=_mark(2) in prompt)
        said = _called()
        said[1]["content"] = _mark(1)
        if calls and _mark(1) not in (self._prompt(reads, said) or ""):
            split = replace(reads, beside_calls="split")
            said += [{"role": "assistant", "content": _mark(3)}, {"role": "user", "content": _mark(4)}]
            prompt = self._prompt(split, said) or ""
            whole = all(mark in prompt for mark in ("markedname", *map(_mark, range(5))))
            reads = split if whole else replace(reads, beside_calls="moved")
        cut = _called()
        cut[1]["tool_calls"][0]["function"]["arguments"] = '{"key": "markedvalue'
        return replace(reads, any_arguments="markedvalue" in (self._prompt(reads, cut) or ""))

    def _writes(self, reads: Reads, roles: list[str]) -> bool:
        return len(self._written(reads, roles)) == len(roles)

    def _written(self, reads: Reads, roles: list[str]) -> set[int]:
        messages = [{"role": role, "content": _mark(i)} for i, role in enumerate(roles)]
        prompt = self._prompt(replace(Reads(), parts=reads.parts), messages) or ""
        return {i for i, _ in enumerate(roles) if _mark(i) in prompt}

    def _prompt(self, reads: Reads, messages: list[Message]) -> str | None:
        if time.thread_time() > self._ends:
            raise SecurityError(f"it computes for more than {MAX_CPU_S:g} s")
        tools = [TOOL] if any("tool_calls" in message for message in messages) else None
        variables = {**self._variables, "add_generation_prompt": True}
        try:
            return render(self._source, adapted(messages, reads), tools, **variables)
        except SecurityError:
            raise
        except (*REFUSALS, RequestError):
            return None


def _called() -> list[Message]:
    function = {"name": "markedname", "arguments": {"key": "markedvalue"}}
    call = {"id": "call00001", "type": "function", "function": function}
    return [
        {"role": "user", "content": _mark(0)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "markedname", "content": _mark(2)},
    ]
