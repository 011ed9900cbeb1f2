"""Which values a JSON schema takes, and which texts a grammar takes, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine.grammars.compiler import source
from engine.grammars.json_schema import enforceable
from engine.wire.structured_outputs import StructuredOutputsParams

_BYTES = LLTokenizer("byte")
MAX_ORDERS = 120  # of the properties of one object, of which a grammar takes one
MAX_TEXTS = 500


def schema_matcher(schema: dict[str, Any], *, closed: bool = False) -> LLMatcher:
    """Raises SchemaError, or ValueError with llguidance's reason."""
    return _checked(LLMatcher.grammar_from_json_schema(enforceable(schema, closed=closed)))


def grammar_matcher(grammar: str) -> LLMatcher:
    """Raises any error of GBNF, or ValueError with llguidance's reason."""
    return _checked(source(StructuredOutputsParams(grammar=grammar)))


def takes_text(matcher: LLMatcher, text: str) -> bool:
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def takes(matcher: LLMatcher, value: Any) -> bool:
    """Return whether the value can be written, in any order of its properties; a whole number with or without `.0`."""
    texts = (json.dumps(form, ensure_ascii=False, separators=(",", ":")) for form in islice(_forms(value), MAX_TEXTS))
    return any(takes_text(matcher, text) for text in texts)


def _checked(grammar: str) -> LLMatcher:
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _forms(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from map(list, islice(product(*(list(_forms(item)) for item in value)), 64))
    elif isinstance(value, dict):
        for order in islice(permutations(value), MAX_ORDERS):
            for values in islice(product(*(list(_forms(value[key])) for key in order)), 16):
                yield dict(zip(order, values, strict=True))
    else:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 + 1:
            yield int(value)
        yield value
