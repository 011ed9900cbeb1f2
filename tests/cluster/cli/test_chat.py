"""`manta chat` as its users start it: at the end of a pipe, and in a terminal."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cluster.cli.chat import ChatAnswer
from tests.cluster.cli.bench.fake_openai_server import FakeOpenAIServer
from tests.processes import accept_sigint

WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    server = FakeOpenAIServer()
    yield server
    server.close()


def command(server: FakeOpenAIServer, *flags: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli.main", "chat", "--url", server.url, "--max-tokens", "3", *flags]


def ask(server: FakeOpenAIServer, question: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(server, *flags), input=question, capture_output=True, text=True, timeout=WAIT_S)


class Terminal:
    """A program in a terminal of its own. seen: all that it wrote, without the terminal's control sequences."""

    def __init__(self, command: list[str]):
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**os.environ, "TERM": "dumb"},
            preexec_fn=accept_sigint,
        )
        os.close(inside)
        self.seen, self._looked = "", 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def wait_for(self, text: str) -> str:
        """All that was written since the last look, up to this text."""
        deadline = time.monotonic() + WAIT_S
        while (found := self.seen.find(text, self._looked)) < 0:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come:\n{self.seen}"
            raw = self._decode(os.read(self._screen, 4096))
            self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw).replace("\r", "")
        before, self._looked = self.seen[self._looked : found], found + len(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal(server) -> Iterator[Terminal]:
    terminal = Terminal(command(server, "--system", "Be brief."))
    yield terminal
    terminal.close()


def test_question_from_a_pipe_gets_the_answer_alone_on_stdout(server):
    server.reasoning = "hm"
    done = ask(server, "What is it?\nTell!\n", "--temperature", "0", "--api-key", "sk-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "aaa\n", "")
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "What is it?\nTell!"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("fake", 0, 3)
    assert server.authorization == "Bearer sk-1"


def test_conversation_in_a_terminal_goes_on_after_an_answer_is_stopped_and_ends_with_ctrl_d(server, terminal):
    terminal.wait_for("fake at ")
    terminal.wait_for("> ")
    server.reasoning = "let me see"
    terminal.type("One?\n")
    assert "let me see\n\naaa\n" in terminal.wait_for("3 tokens, ")
    terminal.wait_for("> ")
    server.reasoning, server.stalls = "", True
    terminal.type("Two?\n")
    terminal.wait_for("aaa")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    server.stalls, server.error = False, "out of luck"
    terminal.type("Three?\n")
    terminal.wait_for("out of luck")
    terminal.wait_for("> ")
    server.error = None
    terminal.type("Four?\n")
    terminal.wait_for("3 tokens, ")
    asked = [message["content"] for message in server.requests[-1][1]["messages"]]
    assert asked == ["Be brief.", "One?", "aaa", "Two?", "aaa", "Four?"], "with what was stopped, without what failed"
    terminal.wait_for("> ")
    terminal.type("/system Be long.\nFive\\\nlines?\n")
    terminal.wait_for("3 tokens, ")
    asked = [message["content"] for message in server.requests[-1][1]["messages"]]
    assert asked == ["Be long.", "Five\nlines?"]
    terminal.wait_for("> ")
    terminal.type("/clear\n/nonsense\n")
    terminal.wait_for("unknown command /nonsense")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_answer_that_breaks_off_and_a_missing_server_are_one_line_and_exit_code_1(server):
    server.breaks_off = True
    done = ask(server, "What?")
    assert done.returncode == 1
    assert done.stderr == "manta: the stream ended early\n"
    url = server.url
    server.url = "http://127.0.0.1:9"
    done = ask(server, "What?")
    server.url = url
    assert done.returncode == 1
    assert done.stderr == "manta: no server answers at http://127.0.0.1:9: connection refused\n"


def test_figures_of_an_answer_leave_out_what_is_not_known():
    assert ChatAnswer().figures == ""
    assert ChatAnswer(tokens=1, first_s=0.5, seconds=0.5).figures == "1 token, the first after 0.50 s"
    assert (
        ChatAnswer(tokens=5, first_s=1.0, seconds=3.0, id="c-1").figures
        == "5 tokens, 2.0 tokens/s, the first after 1.00 s, c-1"
    )
