"""Structural tags, as in vLLM and xgrammar: free text in which parts between tags follow a grammar."""

from __future__ import annotations

import json
from typing import Any

from deployments.openai.call_grammar import Lark, regex_rule
from engine.errors import Described, InvalidParameter
from engine.grammars.references import SchemaError

MAX_DEPTH = 32


def structural_tag_grammar(tag: dict[str, Any] | str, field: str, *, closed: bool) -> str:
    """Return the grammar of a structural tag: one with `format`, or an older one with `structures` and `triggers`.

    tag: an object or its JSON. closed: as in SchemaBuilder. Beginnings and ends of tags match as text, never as special
    tokens. Raises InvalidParameter.
    """
    builder = _Builder(field, closed)
    try:
        given = json.loads(tag) if isinstance(tag, str) else tag
        rule = builder.rule(_triggered_tags(given) if "structures" in given else given["format"], 0)
    except SchemaError as error:
        raise InvalidParameter(field, tag, f"a tag whose JSON schemas can be enforced ({error})") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidParameter(field, tag, f"a structural tag in vLLM's format ({error!r})") from None
    lines = ["%llguidance {}", f"start: {rule}", *builder.lark.lines, r"TEXT: /(?s:.*)/"]
    return "\n".join(lines)


def _triggered_tags(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the format that is equivalent to a tag in the older form."""
    tags = [
        {"begin": part["begin"], "end": part["end"], "content": {"type": "json_schema", "json_schema": part["schema"]}}
        for part in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Builder:
    def __init__(self, field: str, closed: bool):
        self.lark = Lark((), lambda marker: None, closed)
        self._field = field

    def rule(self, part: dict[str, Any], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise InvalidParameter(self._field, Described("a deeper one"), f"a format nested at most {MAX_DEPTH} deep")
        match part["type"]:
            case "const_string":
                return json.dumps(part["value"])
            case "json_schema":
                return self.lark.json(part["json_schema"])
            case "regex":
                return regex_rule(part["pattern"])
            case "any_text":
                return "TEXT"
            case "sequence":
                return " ".join(self.rule(element, depth + 1) for element in part["elements"])
            case "or":
                return f"({' | '.join(self.rule(element, depth + 1) for element in part['elements'])})"
            case "tag":
                return self._tag(part, part["begin"], depth)
            case "triggered_tags":
                return self._triggered(part, depth)
            case "tags_with_separator":
                tags = " | ".join(self._tag(tag, tag["begin"], depth) for tag in part["tags"])
                more = "" if part.get("stop_after_first") else f"({json.dumps(part['separator'])} ({tags}))*"
                return f"(({tags}) {more}){'' if part.get('at_least_one') else '?'}"
        kinds = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags or tags_with_separator"
        raise InvalidParameter(self._field, part["type"], f"a format of type {kinds}")

    def _tag(self, tag: dict[str, Any], begin: str, depth: int) -> str:
        """Return the rule for a tag. begin: the part of the tag's beginning that follows the trigger."""
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        if tag["content"]["type"] == "any_text" and all(ends):
            return f"{json.dumps(begin)} {self.lark.until(*ends)}"
        return f"{json.dumps(begin)} {self.rule(tag['content'], depth + 1)} ({' | '.join(map(json.dumps, ends))})"

    def _triggered(self, part: dict[str, Any], depth: int) -> str:
        """Return the rule for free text in which each trigger must begin one of the tags."""
        found = []
        if not part["triggers"] or not all(part["triggers"]):
            raise InvalidParameter(self._field, part["triggers"], "a list of at least one trigger, none of them empty")
        for trigger in part["triggers"]:
            tags = [tag for tag in part["tags"] if tag["begin"].startswith(trigger)]
            rules = [self._tag(tag, tag["begin"][len(trigger) :], depth) for tag in tags]
            if not rules:
                raise InvalidParameter(self._field, trigger, "a trigger with which at least one tag begins")
            found.append(f"{self.lark.until(trigger)} ({' | '.join(rules)})")
        call = f"({' | '.join(found)})"
        if part.get("stop_after_first"):
            return call if part.get("at_least_one") else f"(TEXT | {call})"
        return f"{call}{'+' if part.get('at_least_one') else '*'} TEXT"
