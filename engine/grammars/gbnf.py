"""Translates GBNF, llama.cpp's format of grammars, to llguidance's Lark.

In GBNF a text is matched character by character. llguidance splits it into lexemes first, each as long as possible, so
that a lexeme of several characters may take some that the next one needs. So here every lexeme is one character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MAX_DEPTH = 100  # of groups
_TOKENS = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<name>[\w-]+)(?=(?P<defines>\s*::=)?) | ::=
    | "(?P<text>(?:[^"\\]|\\.)*)"
    | \[(?P<negated>\^?)(?P<chars>(?:[^\]\\]|\\.)*)\]
    | (?P<not>!?)<(?P<token>[^>\n]*)>
    | (?P<times>[*+?] | \{\s*(?P<low>\d+)?\s*(?P<comma>,)?\s*(?P<high>\d+)?\s*\})
    | (?P<sign>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits


class GbnfError(ValueError):
    """A grammar that is not GBNF; the message is the reason, with its line."""


def gbnf_to_lark(text: str) -> str:
    """Raises GbnfError."""
    return _Translation(text).lark()


class _Translation:
    def __init__(self, text: str):
        self._text = text
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}  #: the last definition of a rule counts, as in llama.cpp
        self._tokens = self._split()
        self._next: re.Match[str] | None = next(self._tokens, None)

    def lark(self) -> str:
        while self._next is not None:
            if self._next["defines"] is None:
                raise self._error("Expected NAME ::=")
            name = self._rule_name(self._take()["name"])
            self._take()
            self._rules[name] = self._alternatives(0)
            if self._next is not None and self._next["defines"] is None:
                raise self._error("Expected a rule")
        if "start" not in self._rules:
            raise GbnfError("there is no rule root")
        if missing := [name for name, lark in self._names.items() if lark not in self._rules]:
            raise GbnfError(f"there is no rule {missing[0]}")
        return "\n".join(["%llguidance {}", *(f"{name}: {rule}" for name, rule in self._rules.items()), ""])

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(f"Expected at most {MAX_DEPTH} groups inside each other")
        found = [self._sequence(depth)]
        while self._next is not None and self._next["sign"] == "|":
            self._take()
            found.append(self._sequence(depth))
        return " | ".join(found)

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while self._next is not None and self._next["defines"] is None and self._next["sign"] not in ("|", ")"):
            token = self._take()
            if token["times"] is not None:
                if not parts:
                    raise self._error("Expected something to repeat before", token)
                parts[-1] = self._alone(parts[-1]) + self._times(token)
            elif token["sign"] == "(":
                parts.append(self._new_rule(self._alternatives(depth + 1)))
                if self._next is None or self._take()["sign"] != ")":
                    raise self._error("Expected ) for", token)
            else:
                parts.append(self._symbol(token))
        return " ".join(parts) or '""'

    def _symbol(self, token: re.Match[str]) -> str:
        if token["name"] is not None:
            return self._rule_name(token["name"])
        if token["text"] is not None:
            chars = "".join(char for char, _ in self._chars(token["text"], token))
            try:
                chars = chars.encode("utf-16", "surrogatepass").decode("utf-16")  # joins surrogates
            except UnicodeDecodeError:
                raise self._error("Expected no half of a character in", token) from None
            return " ".join(map(json.dumps, chars)) or '""'
        if token["chars"] is not None:
            return f"/[{token['negated']}{self._class(token)}]/" if token["chars"] else "/(?s:.)/"
        if token["token"] is not None:
            return self._token(token)
        if token["sign"] == ".":
            return "/(?s:.)/"
        raise self._error("Expected a symbol", token)

    def _alone(self, part: str) -> str:
        """Return a part of a sequence as one symbol that can be repeated."""
        return self._new_rule(part) if " " in part or part.endswith(("*", "+", "?", "}")) else part

    def _new_rule(self, body: str) -> str:
        """Return the name of a rule of our own: llguidance limits how deeply groups are nested."""
        name = f"group_{len(self._rules)}"
        self._rules[name] = body
        return name

    def _times(self, token: re.Match[str]) -> str:
        if token["times"][0] != "{":
            return token["times"]
        low, high = int(token["low"] or 0), token["high"]
        if token["low"] is None and high is None:
            raise self._error("Expected a number in", token)
        return f"{{{low},{high or ''}}}" if token["comma"] else f"{{{low}}}"

    def _class(self, token: re.Match[str]) -> str:
        """Return the characters and ranges of a class, as a regular expression writes them."""
        chars, out = list(self._chars(token["chars"], token)), ""
        while chars:
            (first, _), last = chars.pop(0), ""
            if len(chars) > 1 and chars[0] == ("-", False):
                last, chars = chars[1][0], chars[2:]
                if last < first:
                    raise self._error("Expected a range upwards in", token)
            out += _code(first) + (f"-{_code(last)}" if last else "")
        return out

    def _token(self, token: re.Match[str]) -> str:
        name = token["token"]
        if not token["not"]:
            return f"<{name}>"
        if not re.fullmatch(r"\[\d+\]", name):
            raise self._error("Expected the id of a token, as in !<[7]>, instead of", token)
        return f"<[^{name[1:]}>"

    def _chars(self, text: str, token: re.Match[str]) -> Iterator[tuple[str, bool]]:
        """Yield the characters of a literal or class, each with whether it is escaped."""
        i = 0
        while i < len(text):
            char, escaped = text[i], text[i] == "\\"
            i += 1
            if escaped:
                char, i = text[i], i + 1
                if digits := _CODES.get(char):
                    code, i = text[i : i + digits], i + digits
                    char = self._char(code, digits, token)
                elif char in _ESCAPES or not char.isalnum():
                    char = _ESCAPES.get(char, char)
                else:
                    raise self._error(f"Expected another escape than \\{char} in", token)
            yield char, escaped

    def _char(self, code: str, digits: int, token: re.Match[str]) -> str:
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", code) or int(code, 16) > 0x10FFFF:
            raise self._error(f"Expected {digits} hexadecimal digits of a character instead of {code} in", token)
        return chr(int(code, 16))

    def _rule_name(self, name: str) -> str:
        return self._names.setdefault(name, "start" if name == "root" else f"rule_{len(self._names)}")

    def _split(self) -> Iterator[re.Match[str]]:
        at = 0
        while at < len(self._text):
            token = _TOKENS.match(self._text, at)
            if token is None:
                raise GbnfError(f"Unexpected {self._text[at : at + 20]!r} in line {self._line(at)}")
            at = token.end()
            if token.lastgroup is not None or token[0] == "::=":
                yield token

    def _take(self) -> re.Match[str]:
        token = self._next
        assert token is not None
        self._next = next(self._tokens, None)
        return token

    def _error(self, message: str, token: re.Match[str] | None = None) -> GbnfError:
        token = token or self._next
        found = ("the end", self._text.count("\n") + 1) if token is None else (token[0][:20], self._line(token.start()))
        return GbnfError(f"{message} {found[0]!r} in line {found[1]}")

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1


def _code(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
