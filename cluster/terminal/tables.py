"""Tables of figures in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from cluster.terminal.printable import PrintableConsole

Total = tuple[str, float | None, int]  # name, figure, decimals


def totals(rows: Sequence[Total]) -> Table:
    table = make_table("", "")
    for name, value, decimals in rows:
        table.add_row(name, figure(value, decimals))
    return table


def distributions(corner: str, statistics: Sequence[str], rows: Sequence[tuple[str, object, int]]) -> Table:
    """Return a table of the fields `statistics` of objects. rows: name, object or None, and decimals of each row."""
    table = make_table(corner, *statistics)
    for name, values, decimals in rows:
        shown = (None if values is None else getattr(values, statistic) for statistic in statistics)
        table.add_row(name, *(figure(value, decimals) for value in shown))
    return table


def summary(rows: Iterable[tuple[str, str]]) -> Table:
    """Return lines of a name and a text, without a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def make_table(*columns: str) -> Table:
    """Return a table whose first column names the measurement, and whose other columns are figures."""
    table = Table(show_header=any(columns))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def figure(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"


def show(*parts: Table | str) -> None:
    console = PrintableConsole(highlight=False, markup=False)
    for part in parts:
        # tables are cut to the terminal's width; text stays whole, for copying and for pipes
        console.print(part, soft_wrap=isinstance(part, str))
