"""The requests of a simulation: when they come, how long they are, and which prefixes they share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidParameter

PIECE = 512  # tokens that one hash id stands for, as in Mooncake's traces
OUTPUT_ID = 2**30  # ids from here on stand for tokens that are sampled
VOCABULARY = 2**31 - 1  # of the simulated model: a token is the id of the piece that it belongs to

Times = NDArray[np.float64]
Counts = NDArray[np.int64]


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Parallel arrays, one entry per request, by rising time of arrival (seconds from the start).

    hash_ids: for each request, a name for every PIECE tokens of its prompt, the last of them maybe fewer. Prompts that
        begin with the same ids begin with the same tokens. None where no prompt shares anything.
    """

    name: str
    arrivals_s: Times
    prompt_tokens: Counts
    output_tokens: Counts
    hash_ids: list[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def duration_s(self) -> float:
        return float(self.arrivals_s[-1]) if len(self) else 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return int((self.prompt_tokens + self.output_tokens).max(initial=1))

    def prompt(self, index: int) -> list[int]:
        """Token ids that are equal where, and only where, the trace says that prompts are."""
        length = int(self.prompt_tokens[index])
        if self.hash_ids is None:
            return [index] * length
        tokens: list[int] = []
        for piece in self.hash_ids[index]:
            tokens += [piece] * min(PIECE, length - len(tokens))
        return tokens

    def reuse(self) -> float:
        """Share of all prompt tokens that a cache of infinite size would have, counted in whole pieces."""
        seen: set[int] = set()
        hits = 0
        for ids in self.hash_ids or []:
            matched = 0
            while matched < len(ids) and ids[matched] in seen:
                matched += 1
            hits += matched * PIECE
            seen.update(ids)
        return min(1.0, hits / max(1, int(self.prompt_tokens.sum())))

    def first(self, requests: int) -> Trace:
        """The first so many."""
        ids = self.hash_ids and self.hash_ids[:requests]
        arrays = self.arrivals_s[:requests], self.prompt_tokens[:requests], self.output_tokens[:requests]
        return Trace(self.name, *arrays, ids)

    def at_rate(self, requests_per_s: float) -> Trace:
        """The same requests, sooner or later. Raises InvalidParameter."""
        if not requests_per_s > 0:
            raise InvalidParameter("rate", requests_per_s, "above 0")
        if not self.duration_s:
            return self
        factor = len(self) / requests_per_s / self.duration_s
        return Trace(self.name, self.arrivals_s * factor, self.prompt_tokens, self.output_tokens, self.hash_ids)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From JSON lines in Mooncake's format (arXiv:2407.00079): timestamp in ms, input_length, output_length, and
        hash_ids, which may be left out. Raises InvalidParameter that names the line."""
        decoder = msgspec.json.Decoder(_Line)
        lines = []
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise InvalidParameter(f"{path}:{number}", line[:80], f"a request ({error})") from None
                if found.input_length < 1 or found.output_length < 0 or found.timestamp < 0:
                    raise InvalidParameter(
                        f"{path}:{number}", line[:80], "with lengths and a time that are not negative"
                    )
                if found.hash_ids and not 0 <= min(found.hash_ids) <= max(found.hash_ids) < OUTPUT_ID:
                    raise InvalidParameter(f"{path}:{number} hash_ids", max(found.hash_ids), f"ids below {OUTPUT_ID}")
                lines.append(found)
        if not lines:
            raise InvalidParameter("trace", str(path), "at least one request")
        lines.sort(key=lambda line: line.timestamp)
        shared = any(line.hash_ids for line in lines)
        own = iter(range(OUTPUT_ID - 1, 0, -1))  # for prompts, or ends of prompts, without ids: they share nothing
        return cls(
            path.stem,
            np.array([line.timestamp for line in lines]) / 1000 - lines[0].timestamp / 1000,
            np.array([line.input_length for line in lines], dtype=np.int64),
            np.array([max(1, line.output_length) for line in lines], dtype=np.int64),
            [_complete(line, own) for line in lines] if shared else None,
        )

    def write(self, path: Path) -> None:
        """In the format that `read` takes."""
        with path.open("w", encoding="utf-8") as file:
            for i in range(len(self)):
                line = {
                    "timestamp": round(1000 * float(self.arrivals_s[i]), 3),
                    "input_length": int(self.prompt_tokens[i]),
                    "output_length": int(self.output_tokens[i]),
                }
                file.write(json.dumps(line | ({"hash_ids": self.hash_ids[i]} if self.hash_ids else {})) + "\n")


def _complete(line: _Line, own: Iterator[int]) -> list[int]:
    return line.hash_ids + [next(own) for _ in range(-(-line.input_length // PIECE) - len(line.hash_ids))]
