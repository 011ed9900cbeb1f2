"""Numbers by module, as `alpha_pattern` and `rank_pattern` of adapter_config.json give them.

A key is the end of a module's name, or a regular expression for it. PEFT matches both by Python's `re`, which can take
exponential time. Here, names are looked up, and regular expressions are matched in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from engine.errors import Described
from engine.linear_pattern import LinearPattern, PatternError
from engine.lora.errors import AdapterError

MAX_PATTERNS = 100_000
MAX_REGEXES = 64
MAX_MATCHES = 200_000  # regular expressions, times modules: seconds
MAX_LENGTH = 500  # characters of a key, and of a module's name
NAME = re.compile(r"[\w.-]+", re.ASCII)


class _Regex(NamedTuple):
    order: int
    """Number of the key among all keys."""
    key: str
    pattern: LinearPattern


class ModulePatterns:
    """Which number a module has. The first key that matches decides."""

    def __init__(self, adapter: str, field: str, numbers: Mapping[str, float]):
        """adapter, field: for errors. Raises AdapterError for a key that is not supported."""
        self.numbers = dict(numbers)
        self._values = list(numbers.values())
        self._adapter, self._field = adapter, field
        self._names = {key: order for order, key in enumerate(numbers) if NAME.fullmatch(key)}
        regexes = [(order, key) for order, key in enumerate(numbers) if key not in self._names]
        if len(numbers) > MAX_PATTERNS or len(regexes) > MAX_REGEXES:
            limit = f"at most {MAX_PATTERNS} names of modules, and {MAX_REGEXES} regular expressions"
            raise AdapterError(adapter, field, Described(f"{len(self._names)} and {len(regexes)}"), limit)
        if (longest := max(numbers, key=len, default="")) and len(longest) > MAX_LENGTH:
            raise AdapterError(adapter, field, longest, f"of patterns with at most {MAX_LENGTH} characters")
        self._regexes = [self._compiled(order, key) for order, key in regexes]

    def check_modules(self, count: int) -> None:
        """Raise AdapterError if it would take long to match the names of so many modules."""
        if count * len(self._regexes) > MAX_MATCHES:
            limit = f"at most {MAX_MATCHES // count} regular expressions for {count} modules"
            raise AdapterError(self._adapter, self._field, Described(f"{len(self._regexes)} of them"), limit)

    def number(self, module: str) -> float | None:
        """Return the number of a module; None if no key matches its name. Raises AdapterError if that cannot be said
        within the limits."""
        found = min((self._names[end] for end in _ends(module) if end in self._names), default=len(self._values))
        for regex in self._regexes:
            if regex.order < found and self._matches(regex, module):
                found = regex.order
        return self._values[found] if found < len(self._values) else None

    def _compiled(self, order: int, key: str) -> _Regex:
        # The whole name is matched, so `$` at the end says nothing. `|` would end what `^` belongs to.
        expression = key.removesuffix("$") if not key.endswith("\\$") else key
        if whole := expression.startswith("^") and "|" not in expression:
            expression = expression[1:]
        try:
            return _Regex(order, key, LinearPattern(expression if whole else rf"(.*\.)?({expression})"))
        except PatternError as error:
            raise self._refused(key, error) from None

    def _matches(self, regex: _Regex, module: str) -> bool:
        try:
            return regex.pattern.matches(module)
        except PatternError as error:
            raise self._refused(regex.key, error) from None

    def _refused(self, key: str, reason: PatternError) -> AdapterError:
        limit = f"of names of modules, or of regular expressions without look-around and with few states ({reason})"
        return AdapterError(self._adapter, self._field, key, limit)


def _ends(module: str) -> list[str]:
    """Return the name, and its ends that begin after a dot."""
    return [module, *(module[i + 1 :] for i, character in enumerate(module) if character == ".")]
