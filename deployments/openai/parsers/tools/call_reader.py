"""Base class of readers of a single tool call."""

from __future__ import annotations

from deployments.openai.parsers.output_parser import CallArguments, CallStart, OutputEvent, OutputParser, State
from engine.text.detokenizer import start_of_possible

MAX_HEAD = 300  # characters of a name with the markup around it
NAME = r"""[^\s<>"'(){}\[\]|,:;=]{1,128}"""


class CallReader(OutputParser):
    """Reads one call, until it has `ended`; `rest` is the text after it.

    Text that is no call has `failed`: it yields no events, and `raw` is the text. A call cannot fail once its name has
    been emitted; a rest that cannot be read is then passed on as the model wrote it.
    """

    end_marker = "\0"  # marker up to which a malformed call is passed on
    markers: tuple[str, ...] = ()  # those that may follow a call

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        self.failed = False
        self.complete = False  # whether a call that has failed came to its end, so that another one may follow
        self._begun = False
        self._pieces: list[str] = []

    @property
    def rest(self) -> str:
        return self._buffer

    @property
    def raw(self) -> str:
        text = "".join(self._pieces)
        return text[: len(text) - len(self._buffer)]

    def read(self, text: str, *, final: bool, cut: bool = False) -> list[OutputEvent]:
        """Return the events that no later text can change. final: whether the text is complete. cut: as in finish."""
        self._pieces.append(text)
        self._buffer += text
        self._cut = cut
        events = self._run(final=final)
        if final and not self.ended:
            self._buffer = ""
            self.ended, self.failed = True, not self._begun
        return events

    def _begin(self, out: list[OutputEvent], name: str, call_id: str | None = None) -> None:
        out.append(CallStart(name, call_id))
        self._begun = True

    def _fail(self) -> State | None:
        if self._begun:
            return self._pass_on
        self.ended = self.failed = True
        return None

    def _pass_on(self, out: list[OutputEvent], final: bool) -> State | None:
        text, self.ended = self._take_until(self.end_marker)
        if text:
            out.append(CallArguments(text))
        return None

    def _take_until(self, marker: str) -> tuple[str, bool]:
        """Take the text before `marker` from the buffer, and the marker too if it is there. Returns the text, and
        whether the marker was there."""
        end = self._buffer.find(marker)
        if end >= 0:
            text, self._buffer = self._buffer[:end], self._buffer[end + len(marker) :]
            return text, True
        ready = start_of_possible([marker], self._buffer)
        text, self._buffer = self._buffer[:ready], self._buffer[ready:]
        return text, False

    def _take_head(self, marker: str) -> str | None:
        """Take a text and the marker after it; return None if the buffer has no complete head yet (see _lacks_head)."""
        end = self._buffer.find(marker, 0, MAX_HEAD + len(marker))
        if end < 0:
            return None
        head, self._buffer = self._buffer[:end], self._buffer[end + len(marker) :]
        return head

    def _lacks_head(self, marker: str) -> State | None:
        """Wait for the rest of the head; fail if the buffer is already too long for one."""
        return self._fail() if len(self._buffer) >= MAX_HEAD + len(marker) else None
