"""Regular expressions of files that anybody may have written, matched by llguidance: in time that grows linearly with
the text, and with a limit of states. Python's `re` can take exponential time."""

from __future__ import annotations

MAX_STATES = 1000
MAX_REASON = 120  # characters of llguidance's message


class PatternError(ValueError):
    """An expression that cannot be compiled or matched within the limits; the message is the reason."""


class LinearPattern:
    """A regular expression, without anchors and look-around, that a whole text matches or not."""

    def __init__(self, expression: str):
        """Raises PatternError."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer  # few models and adapters need it

        limits = LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        try:
            grammar = LLMatcher.grammar_from_regex(expression)
            self._matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
            problem = self._matcher.get_error() if self._matcher.is_error() else ""
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
            problem = str(error) or type(error).__name__
        if problem:
            raise PatternError(" ".join(problem.split())[-MAX_REASON:])

    def matches(self, text: str) -> bool:
        """Raises PatternError."""
        tokens, matcher = list(text.encode()), self._matcher.deep_copy()
        try:
            matched = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            problem = matcher.get_error() if matcher.is_error() else ""
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
            problem = str(error) or type(error).__name__
        if problem:
            raise PatternError(" ".join(problem.split())[-MAX_REASON:])
        return matched
