"""Coding agents on a server, beside its peers in one sitting: `python -m benchmarks.agents`.

Each server runs alone, one after another, with its own defaults. First an agent's warm turns, cold prompts, and both at
a time: how much later does the first token of a warm turn come, and the end of a cold prompt? Then sessions of the
published shape (docs/simulator.md), a hundredth as long: with how many at a time do their turns keep the targets?

Servers that are not given, or have no form of the model, are left out, and a line says so.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.agent_clients import (
    REQUEST_S,
    SessionFigures,
    SessionLoad,
    TurnClients,
    TurnShape,
    run_sessions,
)
from benchmarks.agent_load import percentiles
from benchmarks.command import JsonOption, print_report, run
from benchmarks.peer_servers import Server, llamacpp_server, manta_server, vllm_server
from benchmarks.peers import preloaded
from cluster.cli.bench.openai_client import OpenAIClient
from cluster.terminal.tables import figure, make_table, show
from engine.model.checkpoint import smollm2

MAX_SESSIONS = 512
CLOSE = 1.25  # two numbers of sessions between which none is tried


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Warm turns and cold prompts alone, and both at a time. Milliseconds, but for tokens."""

    turns: int  #: beside cold prompts
    warm_alone: tuple[float, float]  #: P50 and P99 of the first token
    warm_beside: tuple[float, float]
    cold_alone: float  #: median to the end
    cold_beside: float
    tokens_per_s_alone: float  #: of cold prompts alone
    tokens_per_s_beside: float  #: of both

    @property
    def warm_ratio(self) -> float:
        """By what factor the P99 of a warm turn's first token grows; the goal is 3 at most."""
        return self.warm_beside[1] / self.warm_alone[1]

    @property
    def cold_ratio(self) -> float:
        """By what factor cold prompts take longer; the goal is 1.3 at most."""
        return self.cold_beside / self.cold_alone


@dataclass(frozen=True, slots=True)
class ServerFigures:
    name: str
    turns: TurnFigures
    tried: list[SessionFigures]
    sessions: int  #: most that keep the targets; 0 if none was found

    @property
    def at_most(self) -> SessionFigures | None:
        return next((each for each in self.tried if each.sessions == self.sessions), None)


@dataclass(frozen=True, slots=True)
class AgentsReport:
    model: str
    shape: TurnShape
    load: SessionLoad
    servers: list[ServerFigures]
    left_out: list[str]


async def measure_turns(url: str, shape: TurnShape, seconds: float, turns: int, prompts: int) -> TurnFigures:
    async with OpenAIClient(url, None, REQUEST_S) as client:
        clients = TurnClients(client, shape, seed=1)
        await clients.begin()
        warm, cold = await clients.warm_alone(turns), await clients.cold_alone(prompts)
        both = await clients.together(seconds)
    in_ms = [tuple(1000 * each for each in percentiles(times.warm_first_s)) for times in (warm, both)]
    return TurnFigures(
        len(both.warm_first_s),
        (in_ms[0][0], in_ms[0][1]),
        (in_ms[1][0], in_ms[1][1]),
        1000 * statistics.median(cold.cold_s),
        1000 * statistics.median(both.cold_s),
        cold.tokens_per_s,
        both.tokens_per_s,
    )


async def most_sessions(url: str, load: SessionLoad, first: int) -> tuple[int, list[SessionFigures]]:
    """Return the most sessions whose turns keep the targets, and what was tried: doubled until too many, then between
    the last two."""
    tried: list[SessionFigures] = []
    async with OpenAIClient(url, None, REQUEST_S) as client:

        async def keeps(sessions: int) -> bool:
            found = await run_sessions(client, load, sessions)
            print(f"{sessions} sessions: {found or 'their first prompts take too long'}", file=sys.stderr)
            tried.extend(() if found is None else (found,))
            return found is not None and found.good >= load.good

        good, bad = 0, first
        while await keeps(bad):
            good, bad = bad, 2 * bad
            if bad > MAX_SESSIONS:
                return good, tried
        while bad - good > 1 and bad > CLOSE * good:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if await keeps(middle) else (good, middle)
    return good, tried


def servers_of(
    model: str, vllm: str | None, vllm_model: str | None, llamacpp: str | None
) -> tuple[list[Server], list[str]]:
    """Return the servers that can be measured, and why others cannot. A GGUF file is that of `smollm2`, the model
    itself, or beside the model's folder as NAME.gguf."""
    path = smollm2.path() if model == smollm2.NAME else Path(model)
    gguf = path if path.suffix == ".gguf" else path.with_name(f"{path.name}.gguf")
    folder = Path(vllm_model or model)
    servers, left_out = [manta_server(model)], []
    if not is_there(vllm):
        left_out.append("vLLM: --vllm names no Python of an environment with it")
    elif not folder.is_dir():
        left_out.append("vLLM: --vllm-model names no folder of safetensors")
    else:
        servers.append(vllm_server(str(folder), str(vllm), preloaded(str(vllm))))
    if not is_there(llamacpp):
        left_out.append("llama.cpp: --llamacpp names no Python of an environment with xllamacpp")
    elif not gguf.is_file():
        left_out.append(f"llama.cpp: there is no {gguf}")
    else:
        servers.append(llamacpp_server(str(gguf), str(llamacpp)))
    return servers, left_out


def is_there(python: str | None) -> bool:
    return python is not None and Path(python).is_file()


ROWS: list[tuple[str, Callable[[TurnFigures], float], int]] = [
    ("warm turn's first token alone, P50, ms", lambda f: f.warm_alone[0], 0),
    ("P99, ms", lambda f: f.warm_alone[1], 0),
    ("beside cold prompts, P50, ms", lambda f: f.warm_beside[0], 0),
    ("P99, ms", lambda f: f.warm_beside[1], 0),
    ("ratio of P99 (goal: at most 3)", lambda f: f.warm_ratio, 2),
    ("cold prompt alone, ms", lambda f: f.cold_alone, 0),
    ("beside warm turns, ms", lambda f: f.cold_beside, 0),
    ("ratio (goal: at most 1.3)", lambda f: f.cold_ratio, 2),
    ("tokens/s, cold prompts alone", lambda f: f.tokens_per_s_alone, 0),
    ("tokens/s, both", lambda f: f.tokens_per_s_beside, 0),
]


def show_report(report: AgentsReport) -> None:
    shape, load = report.shape, report.load
    table = make_table("", *(server.name for server in report.servers))
    for name, value, decimals in ROWS:
        table.add_row(name, *(figure(value(server.turns), decimals) for server in report.servers))
    sessions = make_table("", *(server.name for server in report.servers))
    sessions.add_row("sessions within the targets", *(str(server.sessions) for server in report.servers))
    best = [server.at_most for server in report.servers]
    for name, cell in (
        ("turns within them, %", lambda f: figure(100 * f.good)),
        ("first token, P90, ms", lambda f: figure(1000 * f.first_token_p90_s, 0)),
        ("prompt and output tokens/s", lambda f: figure(f.tokens_per_s, 0)),
        ("prompt tokens cached, %", lambda f: figure(None if f.cached is None else 100 * f.cached)),
    ):
        sessions.add_row(name, *("-" if each is None else cell(each) for each in best))
    show(
        f"{report.model}: warm turns of {shape.context} tokens cached and {shape.turn} new, cold prompts of "
        f"{shape.cold}, answers of {shape.answer}",
        table,
        f"agents at {load.scale:g} of their tokens and {load.time_scale:g} of their tools' times; {load.good:.0%} of "
        f"turns: first token within {1000 * load.ttft_s:g} ms, {1 / load.tpot_s:g} tokens/s after it",
        sessions,
        *(f"left out: {line}" for line in report.left_out),
    )


def main(
    model: Annotated[
        str, typer.Option(help="As for `manta serve`: smollm2, or a folder; beside it, NAME.gguf for llama.cpp.")
    ] = smollm2.NAME,
    vllm: Annotated[str | None, typer.Option(help="Python of the environment with vLLM.")] = None,
    vllm_model: Annotated[str | None, typer.Option(help="Folder that vLLM serves. Default: --model.")] = None,
    llamacpp: Annotated[str | None, typer.Option(help="Python of the environment with xllamacpp.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Cached tokens of a warm turn.")] = 1000,
    turn: Annotated[int, typer.Option(min=1, help="New tokens of a warm turn.")] = 30,
    cold: Annotated[int, typer.Option(min=1, help="Tokens of a cold prompt.")] = 4000,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of these answers.")] = 4,
    think_s: Annotated[float, typer.Option(min=0, help="Mean pause between two warm turns.")] = 1.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long warm turns are beside cold prompts.")] = 60.0,
    alone: Annotated[int, typer.Option(min=1, help="Warm turns that are measured alone.")] = 50,
    prompts: Annotated[int, typer.Option(min=1, help="Cold prompts that are measured alone.")] = 3,
    scale: Annotated[float, typer.Option(help="Factor of the tokens of sessions.")] = 0.01,
    time_scale: Annotated[float, typer.Option(min=0, help="Factor of the times of their tools.")] = 0.25,
    window_s: Annotated[float, typer.Option(min=1, help="How long the turns of a number of sessions count.")] = 15.0,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a context that all servers take.")] = 4000,
    ttft_ms: Annotated[float, typer.Option(min=1, help="Target of the time to the first token.")] = 1000.0,
    tpot_ms: Annotated[float, typer.Option(min=1, help="Target of the time per token after it.")] = 50.0,
    good: Annotated[float, typer.Option(min=0, max=1, help="Share of the turns that must keep both.")] = 0.9,
    sessions: Annotated[int, typer.Option(min=1, help="The first number of sessions that is tried.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Measure agents' warm turns beside cold prompts, and sessions per machine, beside vLLM and llama.cpp.

    Example: python -m benchmarks.agents --vllm ~/vllm/bin/python --vllm-model DIR --llamacpp ~/xllamacpp/bin/python
    """
    shape = TurnShape(context=context, turn=turn, cold=cold, answer=answer, think_s=think_s)
    load = SessionLoad(
        scale=scale, time_scale=time_scale, window_s=window_s, longest=longest, ttft_s=ttft_ms / 1000,
        tpot_s=tpot_ms / 1000, good=good,
    )  # fmt: skip
    servers, left_out = servers_of(model, vllm, vllm_model, llamacpp)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    found = []
    for server in servers:
        with server.running() as url:
            turns = asyncio.run(measure_turns(url, shape, seconds, alone, prompts))
            print(f"{server.name}: {turns}", file=sys.stderr)  # so that a run that is cut off has them
            most, tried = asyncio.run(most_sessions(url, load, sessions))
        found.append(ServerFigures(server.name, turns, tried, most))
    print_report(AgentsReport(Path(model).name, shape, load, found, left_out), as_json, show_report)


if __name__ == "__main__":
    run(main)
