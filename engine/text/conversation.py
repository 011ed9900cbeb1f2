"""Writes a conversation in the form that a chat template reads, so that nothing of it is left out.

The result depends on the conversation and on the template alone, so it is the same on every route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, takewhile
from typing import Any, Literal

import msgspec

from engine.errors import RequestError

Message = dict[str, Any]
INSTRUCTIONS = ("system", "developer")
REASONING = ("reasoning", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class Reads:
    """What a chat template writes of a conversation. By default everything, with contents as texts."""

    known: bool = True
    """False if it writes not even a user's message; then conversations are passed as they are."""
    parts: frozenset[str] = frozenset()
    """Roles whose content it reads only as a list of parts."""
    first: frozenset[str] = frozenset(INSTRUCTIONS)
    """Roles of instructions that it writes at the beginning."""
    pairs: frozenset[tuple[str, str]] = frozenset((a, b) for a in INSTRUCTIONS for b in INSTRUCTIONS)
    """Roles of two messages of instructions at the beginning that it writes both."""
    late: frozenset[str] = frozenset(INSTRUCTIONS)
    """Roles of instructions that it writes behind other messages."""
    repeats: frozenset[str] = frozenset(("user", "assistant"))
    """Roles that may follow themselves."""
    opens: bool = True
    """Whether an assistant's message can be the first."""
    own_turns: bool = True
    """Whether a user's message can stand where none was."""
    tool: bool = True
    """Whether it writes results of tools."""
    calls: bool = True
    """Whether it writes calls of tools."""
    beside_calls: Literal["kept", "split", "moved"] = "kept"
    """What to do with the text of a message that has calls: it is written; must be a message of its own; or must go
    before the result of the call."""
    text_arguments: bool = False
    """Whether arguments are expected as JSON text, not as an object."""
    any_arguments: bool = True
    """Whether it writes arguments that are a text, but not that of an object."""


def adapted(messages: list[Message], reads: Reads) -> list[Message]:
    """Return a conversation as the template reads it. Raises RequestError for a message that is not an object."""
    found = [_plain(i, message) for i, message in enumerate(messages)]
    if not reads.known:
        return found
    found = _with_late(_with_first(_with_calls(found, reads), reads), reads)
    return [_in_form(message, reads) for message in _in_turns(found, reads)]


def texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message's content."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if text := (part if isinstance(part, str) else _text_of(part)):
            yield text


def with_texts(message: Message, new: Iterator[str]) -> Message:
    """Return a message with other texts in its content."""
    content = message.get("content")
    if isinstance(content, list):
        replaced = [{"type": "text", "text": next(new)} if _text_of(part) else part for part in content]
        return {**message, "content": replaced}
    return {**message, "content": next(new)} if content else message


def _text_of(part: Any) -> str | None:
    """Return the text of a part; None for an image."""
    if isinstance(part, str):
        return part
    found = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    return found if isinstance(found, str) else None


def _is_text(part: Any) -> bool:
    """Return whether a part is a text and nothing else; some templates read languages of texts, for instance."""
    given = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
    return _text_of(part) is not None and given <= {"type", "text", "refusal"}


def _plain(i: int, message: Any) -> Message:
    """Return a copy of a message whose content is one text, or a list if there are images."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{i}] must be an object with a role and content", "messages")
    content = message.get("content")
    if isinstance(content, list):
        plain = all(isinstance(part, str) or _is_text(part) for part in content)
        content = "\n".join(_text_of(part) or "" for part in content) if plain else content
    role = "tool" if message["role"] == "function" else message["role"]
    return {**message, "role": role, "content": "" if content is None else content}


def _with_calls(messages: list[Message], reads: Reads) -> list[Message]:
    """Write calls and results that the template does not write as texts, and arguments as it reads them."""
    found: list[Message] = []
    moved: Any = ""
    for message in messages:
        if moved:
            message, moved = {**message, "content": _joined(moved, message["content"])}, ""
        if message["role"] == "tool" and not reads.tool:
            found.append({"role": "user", "content": _tagged("tool_response", message["content"])})
            continue
        calls = [_call(call, reads) for call in message.get("tool_calls") or []]
        if not calls:
            found.append(message)
            continue
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        if not reads.calls:
            written = [_tagged("tool_call", json.dumps(call["function"], ensure_ascii=False)) for call in calls]
            found.append({**rest, "content": reduce(_joined, written, message["content"])})
        elif not message["content"] or reads.beside_calls == "kept":
            found.append({**message, "tool_calls": calls})
        elif reads.beside_calls == "split":
            found += [rest, {"role": message["role"], "content": "", "tool_calls": calls}]
        else:
            moved = message["content"]
            found.append({**message, "content": "", "tool_calls": calls})
    if moved:
        found.append({"role": "assistant", "content": moved})
    return found


def _call(call: Any, reads: Reads) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), reads)}}


def _arguments(given: Any, reads: Reads) -> Any:
    """Return the arguments of an earlier call. A model may have written no JSON object, or max_tokens cut it off."""
    found = given
    if isinstance(given, str):
        try:
            found = msgspec.json.decode(given) if given.strip() else None
        except (ValueError, RecursionError):
            found = given
    if not isinstance(found, dict | None):
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if reads.any_arguments:
            return text
        found = {"arguments": text}
    found = found or {}
    return json.dumps(found, ensure_ascii=False) if reads.text_arguments else found


def _with_first(messages: list[Message], reads: Reads) -> list[Message]:
    """Merge the instructions at the beginning as far as the template needs it."""
    if "developer" not in reads.first:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    first = list(takewhile(lambda message: message["role"] in INSTRUCTIONS, messages))
    rest = messages[len(first) :]
    if not all((a["role"], b["role"]) in reads.pairs for a, b in pairwise(first)):
        first = [reduce(_merged, first)]
    if first and first[0]["role"] not in reads.first:
        said = {"role": "user", "content": reduce(_merged, first)["content"]}
        return [_merged(said, rest[0]), *rest[1:]] if rest and rest[0]["role"] == "user" else [said, *rest]
    return [*first, *rest]


def _with_late(messages: list[Message], reads: Reads) -> list[Message]:
    """Merge later instructions into a user's message at the same place, tagged, unless the template writes them."""
    found: list[Message] = []
    waiting: Message | None = None
    begun = False
    for message in [*messages, None]:
        if message is not None and message["role"] in INSTRUCTIONS and begun and message["role"] not in reads.late:
            note = {"role": "user", "content": _tagged("system-reminder", message["content"])}
            waiting = note if waiting is None else _merged(waiting, note)
            continue
        if waiting is not None and message is not None and message["role"] == "user":
            message, waiting = _merged(waiting, message), None
        if waiting is not None:
            users = [i for i, each in enumerate(found) if each["role"] == "user"]
            if users and (users[-1] == len(found) - 1 or not reads.own_turns):
                found[users[-1]] = _merged(found[users[-1]], waiting)
            else:
                found.append(waiting)
            waiting = None
        if message is not None:
            begun = begun or message["role"] not in INSTRUCTIONS
            found.append(message)
    return found


def _in_turns(messages: list[Message], reads: Reads) -> list[Message]:
    """Merge messages of one role in a row, and put an empty user's message first, where the template needs it."""
    found: list[Message] = []
    for message in messages:
        role, last = message["role"], found[-1] if found else {}
        single = role == last.get("role") and role in ("user", "assistant") and role not in reads.repeats
        apart = last.get("tool_calls") or (message.get("tool_calls") and reads.beside_calls != "kept")
        if single and not apart:
            found[-1] = _merged(last, message)
        else:
            if role == "assistant" and not reads.opens and all(each["role"] in INSTRUCTIONS for each in found):
                found.append({"role": "user", "content": ""})
            found.append(message)
    return found


def _in_form(message: Message, reads: Reads) -> Message:
    content = message["content"]
    if message["role"] in reads.parts and not isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def _merged(one: Message, other: Message) -> Message:
    """Return two messages as one, of the first one's role."""
    found = {**other, **one, "content": _joined(one["content"], other["content"])}
    for name in REASONING:
        if one.get(name) and other.get(name):
            found[name] = _joined(one[name], other[name])
    if calls := [*(one.get("tool_calls") or []), *(other.get("tool_calls") or [])]:
        found["tool_calls"] = calls
    return found


def _joined(one: Any, other: Any) -> Any:
    """Return two contents as one."""
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    first, second = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (one, other))
    return [*first, {"type": "text", "text": "\n\n"}, *second]


def _tagged(tag: str, content: Any) -> Any:
    if isinstance(content, str):
        return f"<{tag}>\n{content}\n</{tag}>"
    return [{"type": "text", "text": f"<{tag}>\n"}, *content, {"type": "text", "text": f"\n</{tag}>"}]
