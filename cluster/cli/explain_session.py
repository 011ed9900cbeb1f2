"""`manta explain --session ID`: the turns of one session, by GET /v1/sessions/{id}."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.terminal.tables import summary
from deployments.parts.sessions.record import SessionTurn
from deployments.parts.sessions.routes import SessionBody

COLUMNS = ("after s", "turn", "session", "waited s", "first token s", "prompt", "hit", "output", "compute s", "price")


def show(body: bytes, console: Console) -> None:
    session = msgspec.json.decode(body, type=SessionBody)
    turns = Table(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(COLUMNS):
        turns.add_column(name, justify="left" if i in (1, 2) else "right", overflow="fold")
    turns.add_column("ran in", style="cyan", overflow="fold")
    turns.add_column("ended", overflow="fold")
    for turn in session.turns:
        turns.add_row(*row_of(turn, session.created_at))
    for part in (summary(summary_of(session)), "", turns):
        console.print(part)


def summary_of(session: SessionBody) -> list[tuple[str, str]]:
    """Return (name, text) for each line of the summary, without empty ones."""
    usage, own = session.usage, session.own_usage
    below = "" if usage.turns == own.turns else f", {usage.turns - own.turns} of them in sessions below it"
    price = f"; price {usage.cost:.6g}" if usage.cost else ""
    budgets = [
        f"{maximum:.15g} {what}" for maximum, what in ((session.max_tokens, "tokens"), (session.max_budget, "in money"))
        if maximum is not None
    ]  # fmt: skip
    left = [
        f"{left:.6g} {what}"
        for left, what in ((session.remaining_tokens, "tokens"), (session.remaining_budget, "in money"))
        if left is not None
    ]
    rows = [
        ("session", session.id),
        ("parent", session.parent or ""),
        ("children", ", ".join(session.children)),
        ("turns", f"{usage.turns}{below}"),
        ("prompts", f"{usage.prompt_tokens} tokens, {hit_of(usage.prompt_tokens, usage.cached_tokens)} of them cached"),
        ("output", f"{usage.output_tokens} tokens"),
        ("cost", f"{usage.compute_seconds:.4f} s of compute{price}"),
        ("budget", ", ".join(budgets)),
        ("left", ", ".join(left)),
        ("older turns", f"{usage.turns - len(session.turns)}, not listed" if usage.turns > len(session.turns) else ""),
    ]
    return [(name, text) for name, text in rows if text]


def row_of(turn: SessionTurn, begins_at: float) -> list[str]:
    """Return the texts of a turn. begins_at: when the session began, in seconds since 1970."""
    return [
        f"{turn.began_at - begins_at:.1f}",
        turn.id,
        turn.session,
        _seconds(turn.wait_s),
        _seconds(turn.first_token_s),
        str(turn.prompt_tokens),
        hit_of(turn.prompt_tokens, turn.cached_tokens) if turn.first_token_s is not None else "-",
        str(turn.output_tokens),
        f"{turn.compute_seconds:.4f}",
        f"{turn.cost:.6g}" if turn.cost else "-",
        ", ".join(turn.engines),
        turn.finish_reason or "runs",
    ]


def hit_of(prompt_tokens: int, cached_tokens: int) -> str:
    return f"{cached_tokens / prompt_tokens:.0%}" if prompt_tokens else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
