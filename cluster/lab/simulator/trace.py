"""Requests of a simulation: when they arrive, how long they are, and which prefixes they share.

Traces are read from files, or drawn at random to match published figures. Equal arguments give equal traces. Lengths
are log-normal, given by median and mean: sigma = sqrt(2 ln(mean / median)). Conversations and formats of files are in
`conversations/`.

docs/simulator.md has the figures and their sources. Where the sources leave something open, this module decides: a
session of `mooncake` draws one of a few system prompts by Zipf's law, and each turn appends the last answer and a new
question, so that prompts grow as in the published trace. Gaps between arrivals are gamma distributed, as described for
BurstGPT (arXiv:2401.17644).
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.arrivals import arrival_times
from cluster.lab.simulator.conversations import mooncake
from cluster.lab.simulator.conversations.agents import agents
from cluster.lab.simulator.conversations.dialogue import ID_LIMIT, Ask, Ids
from cluster.lab.simulator.conversations.files import read_json
from cluster.lab.simulator.conversations.turn import Turn, with_active
from engine.errors import InvalidParameter
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams, seed_of

CSV_COLUMNS = (  # of Azure's traces, and of BurstGPT's: time, tokens of the prompt and of the answer
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
PIECE = mooncake.PIECE  # tokens per hash id
OUTPUT_ID = ID_LIMIT  # ids from here on are sampled tokens
VOCABULARY = 2**31 - 1  # of the simulated model, in which a token is the id of the piece to which it belongs

Times = NDArray[np.float64]
Counts = NDArray[np.int64]
Random = np.random.Generator


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Parallel arrays with one entry per request, in order of arrival (seconds from the start)."""

    name: str
    arrivals_s: Times
    prompt_tokens: Counts
    output_tokens: Counts
    #: For each prompt, an id per `piece` tokens, of which the last may have fewer. Prompts that begin with the same ids
    #: begin with the same tokens. None if no prompts share anything.
    hash_ids: list[list[int]] | None = None
    #: Tokens that an id stands for, all of them its own but in `texts`.
    piece: int = PIECE
    #: Ids that stand for these tokens: parts of the answers of simulated requests, which later prompts repeat.
    texts: dict[int, list[int]] = field(default_factory=dict)
    #: Ids that stand for another number of tokens than `piece`. Those from OUTPUT_ID on are the token of an answer.
    sizes: dict[int, int] = field(default_factory=dict)
    #: What each request waits for; its time in `arrivals_s` is then only where it stands in the order. None if all come
    #: at their times.
    turns: Sequence[Turn] | None = None
    scale: float = 1.0  #: by which the tokens of pieces are multiplied; lengths are multiplied already

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def duration_s(self) -> float:
        return float(self.arrivals_s[-1]) if len(self) else 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return int((self.prompt_tokens + self.output_tokens).max(initial=1))

    @property
    def mean(self) -> int:
        """Mean tokens of a request, prompt and output together."""
        return max(1, int((self.prompt_tokens + self.output_tokens).sum()) // max(1, len(self)))

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the id of each piece of a prompt, and how many tokens of it the prompt has."""
        length, ids = int(self.prompt_tokens[index]), [index] if self.hash_ids is None else self.hash_ids[index]
        ends, begin = 0, 0
        for place, piece in enumerate(ids, 1):
            ends += self.sizes.get(piece, self.piece)
            end = length if place == len(ids) else min(length, math.ceil(ends * self.scale))
            if end > begin:
                yield piece, end - begin
            begin = end

    def prompt(self, index: int) -> list[int]:
        """Return the token ids of a prompt. Two prompts have equal tokens exactly as far as the trace gives them equal
        hash_ids."""
        tokens: list[int] = []
        for piece, size in self.pieces(index):
            tokens += self.texts[piece][:size] if piece in self.texts else [piece] * size
        return tokens

    def request(self, index: int) -> GenerateRequest:
        """Return the request for an engine. Its id is the index."""
        params = _params(int(self.output_tokens[index]))
        return GenerateRequest(request_id=str(index), prompt=self.prompt(index), params=params)

    def first(self, requests: int) -> Trace:
        return self.only(range(min(requests, len(self))))

    def busiest(self, requests: int) -> Trace:
        """Return the `requests` consecutive requests with the most tokens per second, from second 0 on."""
        if requests >= len(self):
            return self
        tokens = np.concatenate([[0], np.cumsum(self.prompt_tokens + self.output_tokens)])
        seconds = self.arrivals_s[requests - 1 :] - self.arrivals_s[: len(self) - requests + 1]
        begin = int(np.argmax((tokens[requests:] - tokens[:-requests]) / np.maximum(seconds, 1e-9)))
        part = self.only(range(begin, begin + requests))
        return replace(part, arrivals_s=part.arrivals_s - part.arrivals_s[0])

    def only(self, kept: Sequence[int]) -> Trace:
        """Return the requests with these indices, which ascend. None waits any more for one that is left out."""
        places, chosen = {index: place for place, index in enumerate(kept)}, np.asarray(kept, dtype=np.int64)
        turns = self.turns and [
            replace(turn, after=tuple(places[before] for before in turn.after if before in places))
            for turn in map(self.turns.__getitem__, kept)
        ]
        return replace(
            self,
            arrivals_s=self.arrivals_s[chosen],
            prompt_tokens=self.prompt_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            hash_ids=self.hash_ids and [self.hash_ids[index] for index in kept],
            turns=turns,
        )

    def at_rate(self, requests_per_s: float) -> Trace:
        """Return the same requests with arrival times, and pauses of conversations, scaled to `rate`. Raises
        InvalidParameter."""
        if not requests_per_s > 0:
            raise InvalidParameter("rate", requests_per_s, "above 0")
        if not self.duration_s:
            return self
        return self.in_time(len(self) / requests_per_s / self.duration_s)

    def in_time(self, factor: float) -> Trace:
        """Return the same requests with all times, and pauses of conversations, multiplied. Raises InvalidParameter."""
        if not (factor >= 0 and math.isfinite(factor)):
            raise InvalidParameter("time_scale", factor, "at least 0, and finite")
        turns = self.turns and [replace(turn, think_s=turn.think_s * factor) for turn in self.turns]
        return replace(self, arrivals_s=self.arrivals_s * factor, turns=turns)

    def scaled(self, scale: float) -> Trace:
        """Return the same requests with fewer tokens, of prompts, of answers and of what prompts share. Raises
        InvalidParameter."""
        if not 0 < scale <= 1:
            raise InvalidParameter("scale", scale, "above 0 and at most 1")
        prompts = np.ceil(self.prompt_tokens * scale).astype(np.int64)
        outputs = np.maximum(1, np.rint(self.output_tokens * scale)).astype(np.int64)
        return replace(self, prompt_tokens=prompts, output_tokens=outputs, scale=self.scale * scale)

    def with_active(self, conversations: int) -> Trace:
        """Return the same requests with so many conversations at a time: each of the others begins as another ends.
        Raises InvalidParameter."""
        if self.turns is None:
            limit = "left out for a trace that has no conversations"
            raise InvalidParameter("max_active_conversations", conversations, limit)
        return replace(self, turns=with_active(self.turns, self.arrivals_s.tolist(), conversations))

    def drawn(self, burstiness: float, seed: int) -> Trace:
        """Return the same requests at the same rate, with arrival times as of a synthetic trace. Raises
        InvalidParameter."""
        _check_burstiness(burstiness)
        if self.turns is not None:
            raise InvalidParameter("burstiness", burstiness, "left out for conversations, whose turns wait for answers")
        if not self.duration_s:
            return self
        times = arrival_times(len(self), len(self) / self.duration_s, burstiness, seed)
        return replace(self, arrivals_s=np.array(times))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file, or a folder: JSON in one of the formats of `conversations/files.py`, or a CSV file with the
        columns of Azure's traces or of BurstGPT. Raises InvalidParameter that names line and field."""
        ids = Ids()
        asks, piece = (_of_csv(path), PIECE) if path.suffix == ".csv" else read_json(path, ids)
        if not asks:
            raise InvalidParameter("trace", str(path), "at least one request")
        return cls.of(path.stem, asks, ids, piece)

    @classmethod
    def of(cls, name: str, asks: Sequence[Ask], ids: Ids, piece: int = PIECE) -> Trace:
        """Return a trace of these requests, in the order of their times."""
        ordered = sorted(asks, key=lambda ask: ask.at_s)
        places = {ask: index for index, ask in enumerate(ordered)}
        answers = {ask.answer: _token_of(index) for ask, index in places.items() if ask.answer is not None}
        hash_ids = [[answers.get(piece, piece) for piece in ask.pieces] for ask in ordered]
        are_turns = any(ask.session is not None for ask in asks)
        return cls(
            name,
            np.array([ask.at_s - ordered[0].at_s for ask in ordered]),
            np.array([ask.prompt_tokens for ask in ordered], dtype=np.int64),
            np.array([ask.output_tokens for ask in ordered], dtype=np.int64),
            hash_ids if any(hash_ids) else None,
            piece,
            sizes={answers.get(piece, piece): size for piece, size in ids.sizes.items()},
            turns=[_turn(ask, index, places) for ask, index in places.items()] if are_turns else None,
        )


def _token_of(index: int) -> int:
    """Return the token that a simulated engine answers to a request."""
    return OUTPUT_ID + seed_of(str(index)) % (OUTPUT_ID - 1)


def _turn(ask: Ask, index: int, places: dict[Ask, int]) -> Turn:
    """Return the turn of a request. One that is of no conversation is one by itself."""
    session = -1 - index if ask.session is None else ask.session
    return Turn(session, ask.agent, tuple(sorted(places[before] for before in ask.after)), ask.think_s)


def _of_csv(path: Path) -> list[Ask]:
    """Requests without tokens, which are those that failed, are left out."""
    lines = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        columns = next((names for names in CSV_COLUMNS if set(names) <= set(rows.fieldnames or ())), None)
        if columns is None:
            known = " or ".join(", ".join(names) for names in CSV_COLUMNS)
            raise InvalidParameter("trace", str(path), f"a file with the columns {known}")
        for row in rows:
            when, *counts = (row[name] or "" for name in columns)
            try:
                at_s = float(when) if when.replace(".", "").isdigit() else datetime.fromisoformat(when).timestamp()
                prompt, output = (int(float(count)) for count in counts)
            except ValueError as error:
                raise InvalidParameter(f"{path}:{rows.line_num}", str(row)[:80], f"a request ({error})") from None
            if prompt > 0 and output > 0:
                lines.append(Ask(at_s, prompt, output))
    return lines


@lru_cache(maxsize=4096)
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True)


# -- synthetic traces ----------------------------------------------------------------------------------------


def make_trace(name: str, requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Trace:
    """Return a synthetic trace. rate: requests per second. Raises InvalidParameter."""
    if name not in KINDS:
        raise InvalidParameter("trace", name, f"a file, or one of {', '.join(KINDS)}")
    if requests < 1:
        raise InvalidParameter("requests", requests, "at least 1")
    if not (rate > 0 and math.isfinite(rate)):
        raise InvalidParameter("rate", rate, "above 0 and finite")
    _check_burstiness(burstiness)
    arrivals = np.array(arrival_times(requests, rate, burstiness, seed))
    return KINDS[name](arrivals, np.random.default_rng([seed, 1]))


def is_file(name: str) -> bool:
    """Return whether a trace is read from a file, or from a folder of files."""
    return bool(name) and name not in KINDS and Path(name).exists()


def _check_burstiness(burstiness: float) -> None:
    if not burstiness > 0:
        raise InvalidParameter("burstiness", burstiness, "above 0")


def lognormal(random: Random, size: int, median: float, mean: float, longest: int) -> Counts:
    """Draw whole numbers from 1 to `longest`."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return np.clip(np.rint(random.lognormal(math.log(median), sigma, size)), 1, longest).astype(np.int64)


def shared_prefix(
    arrivals: Times, random: Random, *, groups: int, system: int, question: int, output: int, turns: int = 0
) -> Trace:
    """Return a trace in which every request begins with the system prompt of one of `groups` groups, drawn uniformly.

    system: tokens of a system prompt, rounded down to a whole number of pieces. turns: if given, each group has exactly
    this many requests, in random order.
    """
    size, pieces = len(arrivals), system // PIECE
    group = random.integers(groups, size=size) if not turns else random.permutation(np.arange(size) % groups)
    rest = -(-question // PIECE)
    ids = [
        [int(group[i]) * pieces + j for j in range(pieces)] + [groups * pieces + i * rest + j for j in range(rest)]
        for i in range(size)
    ]
    return Trace("shared-prefix", arrivals, np.full(size, pieces * PIECE + question), np.full(size, output), ids)


def _azure(name: str, prompt: tuple[float, float, int], output: tuple[float, float, int]) -> Callable[..., Trace]:
    def draw(arrivals: Times, random: Random) -> Trace:
        size = len(arrivals)
        return Trace(name, arrivals, lognormal(random, size, *prompt), lognormal(random, size, *output))

    return draw


SYSTEM_PROMPTS, ZIPF = 40, 1.5
SYSTEM_PIECES = (1, 6)  # range of lengths of a system prompt
MORE_TURNS = 0.48  # chance that a session continues
THINK_S = 60.0  # mean time until a user's next turn
FIRST = (2500.0, 4900.0, 100_000)  # tokens of a user's first input, often a document: median, mean, maximum
NEXT = (420.0, 1300.0, 30_000)
ANSWER = (120.0, 182.0, 2_000)
LONGEST = 120_000


def _mooncake(arrivals: Times, random: Random) -> Trace:
    """Return a trace in which every arrival is the next turn of a session that is due, or the first turn of a new
    session."""
    weights = 1 / np.arange(1, SYSTEM_PROMPTS + 1) ** ZIPF
    ids = count()
    systems = [[next(ids) for _ in range(random.integers(*SYSTEM_PIECES))] for _ in range(SYSTEM_PROMPTS)]
    size = len(arrivals)
    outputs = lognormal(random, size, *ANSWER)
    firsts, nexts = lognormal(random, size, *FIRST), lognormal(random, size, *NEXT)
    chosen = random.choice(SYSTEM_PROMPTS, size, p=weights / weights.sum())
    goes_on, waits = random.random(size) < MORE_TURNS, random.exponential(THINK_S, size)
    due: list[tuple[float, int, list[int], int]] = []  # when a session continues, its pieces and tokens
    prompts, hash_ids = np.zeros(size, dtype=np.int64), []
    for i, now in enumerate(arrivals):
        if due and due[0][0] <= now:
            _, _, pieces, tokens = heapq.heappop(due)
            tokens += int(nexts[i])
        else:
            pieces = systems[chosen[i]]
            tokens = len(pieces) * PIECE + int(firsts[i])
        # only whole pieces keep their ids when the text continues
        pieces = [*pieces, *(next(ids) for _ in range(-(-tokens // PIECE) - len(pieces)))]
        prompts[i] = tokens
        hash_ids.append(pieces)
        after = tokens + int(outputs[i])
        if goes_on[i] and after < LONGEST:
            heapq.heappush(due, (now + waits[i], i, pieces[: tokens // PIECE], after))
    return Trace("mooncake", arrivals, prompts, outputs, hash_ids)


def _agents(arrivals: Times, random: Random) -> Trace:
    ids = Ids()
    return Trace.of("agents", agents(arrivals.tolist(), random, ids), ids)


KINDS: dict[str, Callable[[Times, Random], Trace]] = {
    "agents": _agents,
    "azure-conversation": _azure("azure-conversation", (1020, 1155, 14_000), (129, 211, 2_000)),
    "azure-code": _azure("azure-code", (1500, 2048, 14_000), (13, 28, 2_000)),
    "mooncake": _mooncake,
    "shared-prefix": lambda arrivals, random: shared_prefix(
        arrivals, random, groups=64, system=2048, question=128, output=256
    ),
    "fixed": lambda arrivals, _: Trace("fixed", arrivals, np.full(len(arrivals), 512), np.full(len(arrivals), 64)),
}
