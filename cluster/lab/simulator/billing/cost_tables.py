"""Costs in the tables of `manta simulate` and `manta replay`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from cluster.terminal.tables import Total, figure, make_table

if TYPE_CHECKING:  # `manta --help` need not wait for numpy
    from cluster.lab.simulator.billing.costs import Costs


def cost_table(costs: Mapping[str, Costs]) -> Table:
    """Return a table with the costs of several clusters, by their names."""
    table = make_table("cluster", "per hour", "per request", "per million in", "per million out", "wasted, %")
    for name, each in costs.items():
        table.add_row(
            name,
            figure(each.per_hour, 2),
            figure(each.per_request, 6),
            figure(each.per_million_prompt_tokens, 4),
            figure(each.per_million_output_tokens, 4),
            figure(100 * sum(each.wasted.values())),
        )
    return table


def cost_rows(costs: Costs) -> list[Total]:
    rows: list[Total] = [
        ("cost per hour", costs.per_hour, 2),
        ("cost per request", costs.per_request, 6),
        ("cost per million tokens in", costs.per_million_prompt_tokens, 4),
        ("cost per million tokens out", costs.per_million_output_tokens, 4),
        ("billed by the price list, per hour", costs.billed_per_hour, 2),
    ]
    if costs.saved_per_hour is not None:
        rows.append(("saved by the autoscaler, per hour", costs.saved_per_hour, 2))
    return rows + [(f"wasted ({line}), %", 100 * share, 1) for line, share in costs.wasted.items() if share]
