"""`manta generate`: answers a file of prompts, line by line. Can be resumed, and tries lines again that have failed."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

from engine.errors import RequestError, ServingError
from engine.offline.llm import LLM
from engine.offline.outputs import Logprob, RequestOutput
from engine.wire.sampling_params import SamplingParams

SAMPLING_FIELDS = frozenset(field.name for field in msgspec.structs.fields(SamplingParams))
BEGIN = b'{"index":'  # start of each output line
LINE_FIELDS = frozenset({"id", "prompt", "messages"})
REPLACED_AT_ONCE = 100  # answers to lines that had failed; more if else there would be over MAX_REPLACEMENTS
MAX_REPLACEMENTS = 50  # each writes the whole output


class Choice(msgspec.Struct, omit_defaults=True):
    """One generated sequence of an answer."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


class OutputLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One output line. Line k answers line k of the input, and repeats its `id`."""

    index: int
    id: Any = None
    choices: list[Choice] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


class Earlier(msgspec.Struct):
    """The fields of an earlier answer that are read."""

    index: int
    error: str | None = None


@dataclass(slots=True)
class Summary:
    resumed: int  #: number of lines that earlier runs have answered
    retried: int  #: number of lines that had an error
    tried: int  #: number of lines that this run has to answer, those among them
    failed: int  #: number of those that have an error now
    finished: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the first answer started, output tokens) of each answer, in the order of writing"""

    @property
    def answered(self) -> int:
        return self.tried - self.failed

    def __str__(self) -> str:
        said = [f"answered {self.answered} line{'s' * (self.answered != 1)}"]
        if self.retried:
            said.append(f"{self.retried} tried again")
        if self.resumed:
            said.append(f"{self.resumed} answered before")
        if self.failed:
            said.append(f"{self.failed} failed: the same command tries {'it' if self.failed == 1 else 'them'} again")
        return "; ".join(said)


def generate_file(
    llm: Callable[[], LLM], input_file: Path, output_file: Path, defaults: dict[str, Any], *, progress: bool = True
) -> Summary:
    """Answer every line of `input_file` that `output_file` does not answer yet. Returns a summary.

    An input line is {"prompt": text or token ids} or {"messages": [...]}, with any fields of SamplingParams; `defaults`
    has values for fields that lines leave open. Answers are written in input order. So a killed run leaves complete
    answers and at most one partial line, which the next run removes. A line that cannot be served is answered with an
    `error`, and the next run tries it again. `llm` is called only if there is work to do.
    """
    lines = [line for line in input_file.read_bytes().split(b"\n") if line.strip()]
    earlier = earlier_answers(output_file)
    done, retried = len(earlier), [answer.index for answer in earlier if answer.error is not None]
    if done > len(lines):
        problem = f"{output_file} has {done} answers for {len(lines)} lines; was it written for another input?"
        raise RequestError(problem, "output")
    summary = Summary(done - len(retried), len(retried), len(retried) + len(lines) - done, 0)
    if not summary.tried:
        return summary
    engine, began = llm(), time.monotonic()

    def counted(answer: OutputLine) -> OutputLine:
        summary.failed += answer.error is not None
        tokens = sum(len(choice.token_ids) for choice in answer.choices)
        summary.finished.append((time.monotonic() - began, float(tokens)))
        return answer

    if retried:
        at_once = max(REPLACED_AT_ONCE, math.ceil(len(retried) / MAX_REPLACEMENTS))
        replace_answers(output_file, map(counted, answers(engine, lines, retried, defaults, progress)), at_once)
    if rest := range(done, len(lines)):
        add_answers(output_file, map(counted, in_order(answers(engine, lines, rest, defaults, progress), first=done)))
    return summary


def earlier_answers(output_file: Path) -> list[Earlier]:
    """Return the answers from earlier runs, after removing a partial last line.

    Raises RequestError, and changes nothing, if the file contains anything else.
    """
    if not output_file.exists():
        return []
    *whole, torn = output_file.read_bytes().split(b"\n")
    found = [earlier_answer(output_file, line, index) for index, line in enumerate(whole)]
    if torn:
        if not torn.startswith(BEGIN[: len(torn)]):
            raise not_an_output(output_file, len(whole))
        os.truncate(output_file, sum(len(line) + 1 for line in whole))
    return found


def earlier_answer(output_file: Path, line: bytes, index: int) -> Earlier:
    """Return an output line that answers input line `index`. Raises RequestError if it does not."""
    with suppress(ValueError):
        answer = msgspec.json.decode(line, type=Earlier)
        if answer.index == index:
            return answer
    raise not_an_output(output_file, index)


def add_answers(output_file: Path, answers: Iterator[OutputLine]) -> None:
    with output_file.open("ab") as out:
        for answer in answers:
            out.write(msgspec.json.encode(answer) + b"\n")
            out.flush()
        os.fsync(out.fileno())


def replace_answers(output_file: Path, answers: Iterator[OutputLine], at_once: int) -> None:
    """Replace lines of the file by these answers, which come in any order, `at_once` of them at a time. A kill loses
    fewer than that, and an interrupt none."""
    found: dict[int, bytes] = {}
    try:
        for answer in answers:
            found[answer.index] = msgspec.json.encode(answer)
            if len(found) == at_once:
                replace_lines(output_file, found)
                found = {}
    finally:
        if found:
            replace_lines(output_file, found)


def replace_lines(file: Path, found: dict[int, bytes]) -> None:
    """Replace lines of a file. A kill leaves the whole file as it was, or as it is then."""
    file = file.resolve()
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as out:
        new = Path(out.name)
        try:
            for index, line in enumerate(file.read_bytes().split(b"\n")[:-1]):
                out.write(found.get(index, line) + b"\n")
            out.flush()
            os.fsync(out.fileno())
            shutil.copymode(file, new)
            os.replace(new, file)
        finally:
            new.unlink(missing_ok=True)


def not_an_output(file: Path, index: int) -> RequestError:
    return RequestError(f"{file}:{index + 1} does not answer line {index + 1} of the input; give a new file", "output")


def answers(
    llm: LLM, lines: list[bytes], indices: Sequence[int], defaults: dict[str, Any], progress: bool
) -> Iterator[OutputLine]:
    """Yield the answers to these lines, in the order in which they finish."""
    refused: list[OutputLine] = []
    ids: dict[str, tuple[int, Any]] = {}

    def jobs() -> Iterator[tuple[RequestOutput, SamplingParams]]:
        for index in indices:
            line: dict[str, Any] = {}
            try:
                line = parse_line(lines[index])
                request, params = to_request(llm, index, line, defaults)
            except (ServingError, ValueError) as error:
                refused.append(OutputLine(index=index, id=line.get("id"), error=str(error)))
                continue
            ids[request.request_id] = (index, line.get("id"))
            yield request, params

    for output in llm.run(jobs(), total=len(indices), use_tqdm=progress):
        yield from refused
        refused.clear()
        index, name = ids.pop(output.request_id)
        yield to_answer(index, name, output)
    yield from refused


def parse_line(line: bytes) -> dict[str, Any]:
    fields = msgspec.json.decode(line)
    if not isinstance(fields, dict):
        raise RequestError("a line must be a JSON object", "line")
    return fields


def to_request(
    llm: LLM, index: int, line: dict[str, Any], defaults: dict[str, Any]
) -> tuple[RequestOutput, SamplingParams]:
    """Return the request that a line describes. Its id, and so its seed, depends only on the line; so a resumed run
    gives the same output."""
    known = LINE_FIELDS | SAMPLING_FIELDS
    if unknown := sorted(line.keys() - known):
        raise RequestError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}", unknown[0])
    if ("prompt" in line) == ("messages" in line):
        raise RequestError("a line needs either prompt or messages", "prompt")
    own = {name: value for name, value in line.items() if name in SAMPLING_FIELDS}
    params = msgspec.convert({"max_tokens": None, **defaults, **own}, SamplingParams)
    if "messages" in line:
        prompt = llm.tokenizer.apply_chat_template(msgspec.convert(line["messages"], list[dict[str, Any]]))
    else:
        prompt = msgspec.convert(line["prompt"], str | list[int])
    return llm.request(prompt, params, request_id=f"line {index}"), params


def to_answer(index: int, name: Any, output: RequestOutput) -> OutputLine:
    errors = [choice.error for choice in output.outputs if choice.error is not None]
    return OutputLine(
        index=index,
        id=name,
        choices=[Choice(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs],
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        error=errors[0] if errors else None,
    )


def in_order(answers: Iterator[OutputLine], first: int) -> Iterator[OutputLine]:
    """Yield answers sorted by index. An answer waits for all answers before it."""
    early: dict[int, OutputLine] = {}
    for answer in answers:
        early[answer.index] = answer
        while first in early:
            yield early.pop(first)
            first += 1
    assert not early, f"line {first} was never answered"
