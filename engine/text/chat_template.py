"""Renders chat templates, which are programs in Jinja that come with a model, within bounds of time and size.

The variables, functions and the continuation of a last message are those of transformers' `apply_chat_template`. Its
sandbox keeps a template from files and processes, but not from computing for ever, or from taking all memory.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 256 << 10  # characters of a template; the longest that are published have 20,000
MAX_CPU_S = 5.0
MAX_CHARACTERS = 256 << 20  # of all texts that one rendering makes
MAX_ENTRIES = 1 << 20  # of a list
MAX_BITS = 1 << 14  # of a whole number
MAX_WIDTH = 10_000  # of padding and indentation
MAX_FIELDS = 100  # of a text that is formatted
MISSING = ("urlize", "xmlattr", "pprint", "striptags", "wordwrap", "sum")  # filters whose time is not bounded
REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same field of a message
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
WIDE = re.compile(r"\d{5,}|\*")  # in a format

_running = threading.local()


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.ends, self.characters = time.thread_time() + MAX_CPU_S, MAX_CHARACTERS

    def spend(self, characters: int = 0) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError(f"it makes texts of more than {MAX_CHARACTERS:,} characters")
        if time.thread_time() > self.ends:
            raise SecurityError(f"it computes for more than {MAX_CPU_S:g} s")


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any) -> str:
    """Return the text of a conversation. variables: those of the template, and `continue_final_message`.

    Raises TemplateError, TypeError, ValueError, RecursionError or ArithmeticError for what the template refuses, or for
    a template that exceeds a bound.
    """
    field = variables.pop("continue_final_message", False)
    field = "content" if field is True else field
    messages = [_with_reasoning(_copied(message)) for message in messages]
    final = _tag_last(messages, field, source) if field else ""
    _running.budget = _Budget()
    try:
        text = _compiled(source).render(
            **{"documents": None, **_copied(variables), "messages": messages, "tools": _copied(tools)}
        )
    finally:
        del _running.budget
    return _continued(text, final) if field else text


@lru_cache(128)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise SecurityError(f"it must have at most {MAX_SOURCE:,} characters, got {len(source):,}")
    return _environment().from_string(source)


@lru_cache(1)
def _environment() -> _Environment:
    return _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


def _copied(value: Any) -> Any:
    """Return JSON anew, so that a template sees no objects with methods of their own."""
    if isinstance(value, Mapping):
        return {str(key): _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in value]
    return value if type(value) in (str, int, float, bool, type(None)) else f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _tag_last(messages: list[dict[str, Any]], field: str, source: str) -> str:
    """Put a tag behind the text of the last message that is to be continued, and return the text."""
    if not messages or (final := messages[-1].get(field)) is None:
        raise ValueError(f'continue_final_message is set, but there is no final message with "{field}" to continue')
    fields = [name for name in REASONING if messages[-1].get(name) == final] if field in REASONING else [field]
    if not any(name in source for name in fields):
        raise ValueError(f'continue_final_message is set to "{field}", which the template does not read')
    if isinstance(final, list):
        block = next((part for part in reversed(final) if isinstance(part, dict) and "text" in part), None)
        if block is None:
            raise ValueError("continue_final_message is set, but the final message has no text to continue")
        text = str(block["text"])
        block["text"] = text + TAG
        return text
    for name in fields:
        messages[-1][name] = str(final) + TAG
    return str(final)


def _continued(text: str, final: str) -> str:
    """Return the text up to the end of its last message, which is where the tag is."""
    if final.strip() not in text or TAG.strip() not in text:
        raise ValueError("continue_final_message is set, but the template does not show the final message as it is")
    at = text.rindex(TAG.strip())
    return text[:at] if text[at : at + len(TAG)] == TAG else text[:at].rstrip()


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):
    """Lets each loop, each text that is written and each that is joined pass a filter that counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "joined")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(each, "written") for each in node.nodes]
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "built")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "built") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "built")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno, environment=node.environment)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, f" {name}", [], [], None, None, lineno=node.lineno, environment=node.environment)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # and not all that it holds, which may be itself

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.filters = {name: _measured(name, each) for name, each in self.filters.items() if name not in MISSING}
        self.filters |= {" counted": _counted, " joined": _joined, " written": _written, " built": _built}
        self.globals.pop("lipsum")
        self.globals |= {"dict": _dict, "namespace": _namespace}
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda format: datetime.now().strftime(format)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        if isinstance(owner := getattr(method, "__self__", None), str):
            _check_method(method.__name__, owner, args)
        if not isinstance(__obj, Macro):
            _check_numbers((*args, *kwargs.values()), 1 << 20)
        return _spent(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _spent(super().call_binop(context, operator, left, right))


@pass_context
def _counted(context: Any, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _running.budget.spend()
        yield value


@pass_context
def _joined(context: Any, values: list[Any]) -> str:
    return str(_spent("".join(map(str, values))))


@pass_context
def _built(context: Any, value: Any) -> Any:
    return _spent(value)


@pass_context
def _written(context: Any, value: Any) -> Any:
    return _spent(value if isinstance(value, str) else str(value))


def _spent(value: Any) -> Any:
    if isinstance(value, bytes):
        raise SecurityError("bytes are not supported")
    _running.budget.spend(len(value) if isinstance(value, str) else _entries(value))
    return value


def _entries(value: Any) -> int:
    """Return how many entries a list or an object has with all that is in it, each as often as it is there. Raises
    SecurityError if they are too many, or if their texts are too long to be written out."""
    entries = characters = 0
    inside = [value]
    while inside:
        match inside.pop():
            case str(text):
                characters += len(text)
            case int(number):
                characters += number.bit_length() // 3
            case dict(each):
                entries += len(each)
                inside += (each.keys(), each.values())
            case list() | tuple() | KeysView() | ValuesView() | ItemsView() as each:
                entries += len(each)
                inside += each
        if entries > MAX_ENTRIES:
            raise SecurityError(f"it makes lists of more than {MAX_ENTRIES:,} entries")
        if characters > MAX_CHARACTERS // 4:
            raise SecurityError(f"it makes lists of more than {MAX_CHARACTERS // 4:,} characters")
    return entries


def _measured(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if hasattr(filter, "jinja_pass_arg") else args
        _check_numbers((*given[1:], *kwargs.values()), MAX_WIDTH)
        if given and isinstance(text := given[0], str):
            rest = (*given[1:], *kwargs.values())
            _check_method(name, text, rest)
        elif name == "join" and isinstance(given[0], list | tuple):
            _check_method("join", str((*given[1:2], *kwargs.values(), "")[0]), (given[0],))
        return _spent(filter(*args, **kwargs))

    return bounded


def _check_numbers(values: Iterable[Any], most: int) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            raise SecurityError(f"the number {str(value)[:50]} is above {most:,}")


def _check_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Refuse a method of a text, or a filter, whose result would be too large."""
    size = 0
    match name, args:
        case "replace", (str(old), str(new), *_):
            size = (text.count(old) if old else len(text) + 1) * len(new)
        case "join", (list(values) | tuple(values), *_):
            size = len(text) * len(values) + sum(len(value) for value in values if isinstance(value, str))
        case "indent", (int(width), *_):
            size = width * (text.count("\n") + 1)
        case "format" | "format_map" | "translate", _:
            _check_operands("%", text, args)
        case _:
            return
    _running.budget.spend(size)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        if WIDE.search(left) or left.count("%") + left.count("{") > MAX_FIELDS:
            raise SecurityError("a format has wide fields, or many")
        _running.budget.spend(MAX_FIELDS * sum(len(value) for value in values if isinstance(value, str)) // 10)
    elif operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(count, int):
                _running.budget.spend(len(value) * max(0, count))
        _check_bits(left, right, lambda a, b: a + b)
    elif operator == "**":
        _check_bits(left, right, lambda a, _: a * abs(right))


def _check_bits(left: Any, right: Any, of_result: Callable[[int, int], int]) -> None:
    if isinstance(left, int) and isinstance(right, int) and of_result(left.bit_length(), right.bit_length()) > MAX_BITS:
        raise SecurityError(f"a number has more than {MAX_BITS:,} bits")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, leave characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    attributes = dict(*args, **kwargs)
    if any(str(name).startswith("_") for name in attributes):
        raise SecurityError("a namespace cannot have attributes that begin with _")
    return _Namespace(**attributes)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
