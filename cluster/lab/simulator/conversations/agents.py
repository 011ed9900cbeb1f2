"""Sessions of coding agents, as InferenceX's AgentX publishes their shape: some 43 turns a session, 142,000 tokens in
and 444 out a turn in the mean, more than 95 % of the input cached if nothing is evicted, and subagents in 44 % of the
sessions, about four each, at a time.

The first prompts and the longest are as in the traces of callanjfox/kv-cache-tester (README and docs: 15,000 tokens of
tools and system prompt, 20,000 of a first prompt in the median). What the sources leave open is decided here: that the
means are those of the agent itself, without its subagents; how long tools run; that subagents begin with a prompt of
their own; and that a session ends when its context is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import numpy as np

from cluster.lab.simulator.conversations.dialogue import Ask, Dialogue, Ids

Random = np.random.Generator
Lengths = tuple[float, float, float]  # median, mean and maximum of a log-normal distribution

HARNESSES = 4  # programs with a system prompt of their own
SYSTEM_TOKENS = 15_000
FIRST: Lengths = (5_000, 12_000, 100_000)  # tokens of the task and of what comes with it
TURNS: Lengths = (32, 52, 300)
TOOL: Lengths = (900, 3_600, 60_000)  # tokens of a tool's output
ANSWER: Lengths = (220, 444, 8_000)
THINK_S: Lengths = (4, 12, 300)  # while a tool runs
LONGEST = 400_000  # tokens of a context, after which a session ends
WITH_SUBAGENTS = 0.44
SUBAGENTS = (2, 6)  # begun at a time
SUB_SYSTEM_TOKENS = 10_000
SUB_TASK: Lengths = (600, 1_000, 8_000)
SUB_TURNS: Lengths = (8, 12, 60)


def agents(arrivals: Sequence[float], random: Random, ids: Ids) -> list[Ask]:
    """Return as many requests as there are arrivals. A session begins at the arrival that follows as many arrivals as
    the sessions before it have requests, so that the mean rate is that of the arrivals."""
    asks: list[Ask] = []
    for session in count():
        if len(asks) >= len(arrivals):
            break
        asks += _session(ids, random, session, arrivals[len(asks)])
    return sorted(asks, key=lambda ask: ask.at_s)[: len(arrivals)]


def _session(ids: Ids, random: Random, session: int, at_s: float) -> list[Ask]:
    asks, agent = [], Dialogue(ids, session, at_s)
    agent.say([ids.of(("system", int(random.integers(HARNESSES))), SYSTEM_TOKENS), ids.new(_draw(random, FIRST))])
    turns = _draw(random, TURNS)
    burst = int(random.integers(turns)) if random.random() < WITH_SUBAGENTS else None
    think_s = 0.0
    for turn in range(turns):
        asks.append(agent.ask(_draw(random, ANSWER), think_s))
        if agent.tokens > LONGEST:
            break
        if turn == burst:
            think_s = 0.0
            subagents = [
                _subagent(ids, random, session, number, asks[-1])
                for number in range(1, int(random.integers(SUBAGENTS[0], SUBAGENTS[1] + 1)) + 1)
            ]
            asks += [ask for each in subagents for ask in each]
            agent.after = [each[-1] for each in subagents]
            agent.say([last.answer for last in agent.after if last.answer is not None])
        else:
            think_s = float(_lognormal(random, THINK_S))
            agent.say([ids.new(_draw(random, TOOL))])
    return asks


def _subagent(ids: Ids, random: Random, session: int, number: int, begun_by: Ask) -> list[Ask]:
    asks, agent = [], Dialogue(ids, session, agent=number, after=[begun_by])
    agent.say([ids.of("system of subagents", SUB_SYSTEM_TOKENS), ids.new(_draw(random, SUB_TASK))])
    think_s = 0.0
    for _ in range(_draw(random, SUB_TURNS)):
        asks.append(agent.ask(_draw(random, ANSWER), think_s))
        agent.say([ids.new(_draw(random, TOOL))])
        think_s = float(_lognormal(random, THINK_S))
    return asks


def _lognormal(random: Random, lengths: Lengths) -> float:
    median, mean, longest = lengths
    return min(longest, random.lognormal(math.log(median), math.sqrt(2 * math.log(mean / median))))


def _draw(random: Random, lengths: Lengths) -> int:
    return max(1, round(_lognormal(random, lengths)))
