"""The commands `manta tape save` and `manta replay`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.help import App
from cluster.config.idle_flags import refuse_idle
from cluster.flags import ApiKeyOption, JsonOption
from deployments.errors import RequestNotFound
from engine.errors import InvalidParameter

if TYPE_CHECKING:  # `manta --help` need not wait for them
    from rich.console import Console

    from cluster.lab.explorer.outcome import EngineOutcome
    from cluster.lab.explorer.routes import RouterOutcome
    from deployments.billing.prices import Prices
    from deployments.parts.tape.choice_record import RouterTape
    from engine.parts.tape.engine_tape import EngineTape

tape = App(help="What the schedulers of a running cluster have decided (docs/replay.md).")


@tape.command()
def save(
    output: Annotated[Path, typer.Argument(dir_okay=False, help="File for the tape.")] = Path("manta.tape"),
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKeyOption = None,
) -> None:
    """Save the newest part of the tapes of all engines and routers, for `manta replay`. They contain no text.

    On a server with API keys, only those of `ingress.admin_keys` may save a tape.

    Example: manta tape save monday.tape --url http://127.0.0.1:8000
    """
    from cluster.cli.bench.openai_client import fetch
    from cluster.lab.tape.tapes import read_routers
    from engine.parts.tape.file import read_tapes

    output.write_bytes(fetch(url, "/debug/tape", api_key))
    tapes = read_tapes(output)
    what = f"{len(tapes)} engines and {len(read_routers([output]))} routers"
    print(f"{output} has the tapes of {what} ({output.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)


@tape.command()
def check(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKeyOption = None,
    every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between two looks. Default: one look, and the end.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port on which `manta_simulation_ratio` is served for Prometheus.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the requests of a running server's tapes, and show how far the simulator is off what has come.

    `manta tune` and `manta replay --set` are off by as much, at least.

    Example: manta tape check --url http://127.0.0.1:8000 --every 600 --metrics-port 9464
    """
    from cluster.cli.bench.openai_client import fetch
    from cluster.lab.recorded.simulation_check import SimulationCheck

    rule = "--metrics-port", every is None, "without --every: one look ends at once"
    refuse_idle({"--metrics-port": metrics_port}, rule)
    SimulationCheck(lambda: fetch(url, "/debug/tape", api_key)).run(every, metrics_port, as_json=as_json)


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Files of `manta tape save`, with one tape of each engine."),
    ],
    engine: Annotated[
        str | None,
        typer.Option(help="Id of the engine to look at. Default: the first; for --request, those that had it."),
    ] = None,
    request: Annotated[str | None, typer.Option(help="Show what happened to the request with this id.")] = None,
    at: Annotated[
        str | None,
        typer.Option(help="Show the scheduler at a time, in seconds from the start; or at a step, as `#12`."),
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="Go through the tape by commands read from stdin.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Simulate the same requests with another option, such as `max_num_seqs=64`."),
    ] = None,
    engine_hour: Annotated[
        float | None, typer.Option(min=0, help="Money for an hour of an engine, as `prices.engine_hour`.")
    ] = None,
    kv_gib_hour: Annotated[
        float | None, typer.Option(min=0, help="Money for an hour of a GiB of KV cache, as `prices.kv_gib_hour`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let schedulers and routers decide again what they decided when a tape was saved, and compare every decision.

    Exit code 1 if a decision differs: the tape was made by another version, or the scheduler depends on something that
    the tape does not have.

    With --request, show which engines the routers chose for a request, and why, and what its schedulers did. With --at
    or --step, show what one scheduler did. With --set, predict what other options would have done to the same requests.
    docs/replay.md says how far to trust the prediction. With prices, show costs as well.

    Example: manta replay monday.tape --at 61.5

    Example: manta replay monday.tape --set max_num_seqs=64 --set decode.num_replicas=3
    """
    from cluster.lab.tape.replay_limits import replay_limits
    from cluster.lab.tape.tapes import bytes_of, read_routers, replayed
    from deployments.billing.prices import Prices
    from engine.parts.tape.file import read_all

    given = {"--engine": engine, "--request": request, "--at": at, "--set": set_, "--engine-hour": engine_hour}
    given |= {"--kv-gib-hour": kv_gib_hour, "--step": step or None, "--json": as_json or None}
    looks = request is not None or at is not None or step
    prices_and_json = "--engine-hour --kv-gib-hour --json"
    refuse_idle(
        given,
        ("--engine --request --at --step", set_ is not None, "with --set, which simulates all engines"),
        ("--at --step", request is not None, "with --request"),
        ("--step", at is not None, "with --at"),
        ("--engine", not looks, "without --request, --at or --step: all engines are compared"),
        (prices_and_json, looks and set_ is None, "with --request, --at or --step, which show steps of a scheduler"),
    )
    tapes, prices = read_all(files), Prices(engine_hour=engine_hour or 0.0, kv_gib_hour=kv_gib_hour or 0.0)
    differs = 0
    with replayed(tapes, files):
        if set_ is not None:
            from cluster.lab.recorded.prediction import show_prediction

            return show_prediction(files, set_, prices, as_json=as_json)
        with replay_limits(bytes_of(tapes)):
            if request is not None:
                _follow(tapes if engine is None else [_chosen(tapes, engine)], read_routers(files), request)
            elif at is not None or step:
                _look(_chosen(tapes, engine), at)
            else:
                differs = _compare(tapes, read_routers(files), prices, as_json)
    if differs:
        raise typer.Exit(1)


def _follow(tapes: list[EngineTape], routers: list[RouterTape], request: str) -> None:
    """Show a request in all routers and engines. Raises RequestNotFound, UnknownState and Diverged."""
    from cluster.lab.explorer.explore import follow
    from cluster.lab.explorer.routes import choices_of, show_choice
    from cluster.lab.tape.replay import Replay

    console, found = _console(), False
    for router, choice in choices_of(routers, request):
        found = True
        show_choice(router, choice, console)
    for tape in tapes:
        found = follow(Replay(tape), request, console) or found
    if not found:
        raise RequestNotFound(request)


def _look(tape: EngineTape, at: str | None) -> None:
    """Show a moment, or obey commands from stdin. Raises UnknownState and Diverged."""
    from cluster.lab.explorer.explore import explore, show_at
    from cluster.lab.tape.replay import Replay

    if at is not None:
        show_at(Replay(tape), at, _console())
    else:
        explore(Replay(tape), _console())


def _console() -> Console:
    from cluster.terminal.printable import PrintableConsole

    return PrintableConsole(highlight=False, markup=False, emoji=False)


def _chosen(tapes: list[EngineTape], engine: str | None) -> EngineTape:
    found = next((one for one in tapes if engine in (None, one.engine_id)), None)
    if found is None:
        raise InvalidParameter("--engine", engine, f"one of {', '.join(one.engine_id for one in tapes)}")
    return found


def _compare(tapes: list[EngineTape], routers: list[RouterTape], prices: Prices, as_json: bool) -> int:
    """Replay all tapes and print what came of it. Returns the exit code."""
    from cluster.lab.explorer.outcome import replay_whole
    from cluster.lab.explorer.routes import choose_all_again
    from cluster.lab.simulator.billing.cost_tables import cost_rows
    from cluster.lab.tape.tapes import other_versions
    from cluster.terminal.tables import make_table, show, totals

    outcomes, routed = [replay_whole(one, prices) for one in tapes], [choose_all_again(one) for one in routers]
    found: list[EngineOutcome | RouterOutcome] = [*outcomes, *routed]
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in found]))
    else:
        table = make_table("engine", "role", "seconds", "requests", "steps", "plans equal")
        for engine in outcomes:
            table.add_row(*engine.row())
        choices = make_table("router", "to pool", "seconds", "choices equal")
        for router in routed:
            choices.add_row(*router.row())
        show(table, *([choices] if routed else []))
        for engine in outcomes:
            if engine.costs is not None:
                show(f"{engine.engine_id} has cost", totals(cost_rows(engine.costs)))
        for one in tapes:
            if one.reason:
                show(f"{one.engine_id}: the tape was kept, because: {one.reason}")
        for outcome in found:
            if outcome.problem:
                show(f"{outcome.name}: {outcome.problem}")
        if others := other_versions(tapes):
            show(f"decisions may differ: {others}")
    return int(any(outcome.differs for outcome in found))
