"""Measures a model that people use: `python -m benchmarks.real_model`, after `manta pull smollm2`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from benchmarks.command import run
from benchmarks.real_model import offline, served
from benchmarks.real_model.offline import Row
from cluster.terminal.tables import make_table, show
from engine.errors import InvalidParameter

PARTS: dict[str, tuple[str, ...]] = {  # the heads of their tables
    "perplexity": ("weights", "perplexity", "to float32", "likeliest token"),
    "drafts": ("task", "method", "tokens", "drafted", "accepted", "of all tokens", "times as fast (quartiles)"),
    "chats": ("computed", "chats", "other text", "tokens"),
    "grammars": ("", "", "answers", "parse", "follow the schema"),
    "conversations": (
        "model",
        "other text",
        "answers that end",
        "cached, later turns",
        "ms to first text",
        "ms per token",
    ),
}
Parts = Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}. Default: all.")]


def main(
    parts: Parts = None,
    model: Annotated[str, typer.Option(help="A GGUF model that chats; for perplexity, a checkpoint too.")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, help="Of the text whose perplexity is measured.")] = 6144,
    texts: Annotated[int, typer.Option(min=2, max=20, help="Of each task for drafts.")] = 12,
    chats: Annotated[int, typer.Option(min=1, max=1000, help="That are compared alone and beside others.")] = 1000,
) -> None:
    """Measure perplexities, drafts, and what depends on other requests; by a server grammars and conversations.

    Example: python -m benchmarks.real_model perplexity drafts
    """
    for part in parts or ():
        if part not in PARTS:
            raise InvalidParameter("PARTS", part, f"of {', '.join(PARTS)}")
    rows: dict[str, Callable[[], Iterator[Row]]] = {
        "perplexity": lambda: offline.perplexities(model, tokens),
        "drafts": lambda: offline.drafts(model, texts),
        "chats": lambda: offline.chats(model, chats),
        "grammars": lambda: served.grammars(model),
        "conversations": lambda: served.conversations(model, texts),
    }
    for part in parts or PARTS:
        print_rows(part, rows[part]())


def print_rows(part: str, rows: Iterator[Row]) -> None:
    table = make_table(*PARTS[part])
    for row in rows:
        print(part, *row, sep="; ", file=sys.stderr, flush=True)  # it takes minutes
        table.add_row(*row)
    show(part, table)


if __name__ == "__main__":
    run(main)
