"""`manta top`: the cluster in a terminal, from the console's feed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.cli.bench.openai_client import OpenAIClient
from cluster.terminal.tables import figure
from deployments.parts.console.cluster_watcher import ClusterState
from deployments.replicas.pools import ReplicaStatus
from deployments.replicas.scaling_report import ScalingChange
from engine.errors import RequestError
from engine.wire.parts.experts import ExpertReport

NUM_REQUESTS, NUM_EVENTS = 8, 5
CLOCK = "%H:%M:%S"


def top(url: str, api_key: str | None, *, once: bool) -> None:
    """Show the cluster until Ctrl-C. once: whether to print the view only once. Rates are computed from the difference
    between two polls."""
    console = Console(highlight=False)
    try:
        asyncio.run(_show(OpenAIClient(url, api_key, timeout_s=30.0), console, once=once))
    except KeyboardInterrupt:
        return


async def _show(client: OpenAIClient, console: Console, *, once: bool) -> None:
    async with client, aclosing(_states(client)) as states:
        before = await anext(states)
        if once:
            console.print(view(await anext(states), before))
            return
        with Live(view(before, None), console=console, screen=True, auto_refresh=False) as live:
            async for state in states:
                if state.at != before.at:  # a new stream may begin with the last known state
                    live.update(view(state, before), refresh=True)
                    before = state


async def _states(client: OpenAIClient) -> AsyncGenerator[ClusterState]:
    """Yield each state. The server ends a stream after some seconds; it is then requested again."""
    while True:
        async for event in client.events("/console/state"):
            try:
                yield msgspec.json.decode(event, type=ClusterState)
            except msgspec.DecodeError as error:
                raise RequestError(f"the server has another version of Manta: {error}") from error


def view(state: ClusterState, before: ClusterState | None) -> RenderableType:
    """Return the view of a state. before: earlier state from which rates are computed."""
    old = {} if before is None else {replica.engine_id: replica for _, _, replica in _replicas(before)}
    elapsed_s = state.at - before.at if before is not None else 0.0
    columns = ["running", "waiting", "tokens/s", "steps/s", "KV used", "cached", "hits"]
    handoffs = any(model.prefill or model.encode for model in state.models)
    table = _table(["replica"], [*columns, "handoffs"] if handoffs else columns)
    for _, role, replica in _replicas(state):
        table.add_row(*_row(role, replica, old.get(replica.engine_id), elapsed_s)[: len(table.columns)])
    waiting = sum(state.waiting.values())
    asleep = "".join(f", {model.model} is asleep" for model in state.models if model.asleep)
    parts: list[RenderableType] = [
        Text(f"{time.strftime(CLOCK, time.localtime(state.at))}  {waiting} wait for admission{asleep}"),
        table,
        *(Text(line) for _, _, replica in _replicas(state) for line in _experts(replica)),
    ]
    if state.requests:
        parts += ["", _requests(state)]
    happened = [(e.at, f"{e.kind} {e.name}") for e in state.events]
    happened += [
        (c.at, f"{c.pool}-{c.model} from {c.before} to {c.after} replicas: {c.reason}{_costs(c)}")
        for c in state.scaling
    ]
    if happened:
        parts.append("")
    for at, what in sorted(happened, reverse=True)[:NUM_EVENTS]:
        parts.append(Text(f"{time.strftime(CLOCK, time.localtime(at))}  {what}"))
    return Group(*parts)


def _costs(change: ScalingChange) -> str:
    """Return what a change costs and saves; nothing without prices."""
    if not change.saved_per_hour:
        return ""
    direction = "less" if change.saved_per_hour > 0 else "more"
    return f", {change.cost_per_hour:,.2f} per hour ({abs(change.saved_per_hour):,.2f} {direction})"


def _table(names: Sequence[str], figures: Sequence[str]) -> Table:
    """Return a table whose names wrap in a narrow terminal, and whose figures do not."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _replicas(state: ClusterState) -> list[tuple[str, str, ReplicaStatus]]:
    """Return model, role and status of each replica."""
    return [
        (model.model, role, replica)
        for model in state.models
        for role, replicas in model.by_role.items()
        for replica in replicas
    ]


def _row(role: str, replica: ReplicaStatus, old: ReplicaStatus | None, elapsed_s: float) -> tuple[Text | str, ...]:
    stats, before = replica.stats, None if old is None else old.stats
    tokens = steps = None
    if before is not None and elapsed_s > 0:
        total, past = (s.generation_tokens if role == "decode" else s.prefill_tokens for s in (stats, before))
        tokens, steps = max(0, total - past) / elapsed_s, max(0, stats.steps - before.steps) / elapsed_s
    hits = stats.prefix_hit_tokens / stats.prefix_queried_tokens if stats.prefix_queried_tokens else None
    return (
        Text(replica.engine_id),
        str(stats.running),
        str(stats.waiting + stats.receiving),
        figure(tokens, 0),
        figure(steps, 0),
        f"{stats.kv_usage:.0%}",
        f"{stats.blocks_cached / stats.blocks_total:.0%}",
        "-" if hits is None else f"{hits:.0%}",
        str(len(replica.live_handoffs)),
    )


def _experts(replica: ReplicaStatus) -> list[str]:
    """Return a line for each stage of an engine whose ranks share whole experts."""
    lines, report = [], replica.stats.record(ExpertReport)
    for experts in () if report is None else report.stages:
        total = max(1, sum(experts.rank_tokens))
        loads = " ".join(f"{tokens / total:.0%}" for tokens in experts.rank_tokens)
        hottest = "".join(f", layer {n} expert {expert} has {share:.0%}" for n, expert, share in experts.top[:1])
        where = f"{replica.engine_id} stage {experts.stage}" if experts.stage else replica.engine_id
        balanced = f"balanced {experts.balancedness:.0%}, load of ranks {loads}"
        stopped = ", and no more move, because a rank failed" if experts.stopped else ""
        lines.append(f"experts of {where}: {balanced}{hottest}, {experts.moved} moved{stopped}")
    return lines


def _requests(state: ClusterState) -> Table:
    table = _table(["request", "model", "state"], ["prompt", "output", "first, s"])
    for request in state.requests[:NUM_REQUESTS]:
        ended = request.reason or request.state
        replays = f", {request.replays} replay{'s' * (request.replays > 1)}" if request.replays else ""
        table.add_row(
            Text(request.request_id), Text(request.model), f"{ended}{replays}", str(request.prompt_tokens),
            str(request.output_tokens), figure(request.first_token_s, 3),
        )  # fmt: skip
    return table
