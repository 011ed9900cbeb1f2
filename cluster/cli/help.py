"""The help of `manta` and its commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from cluster.config.flag_groups import COMMON, GROUP_OF, GROUPS
from engine.errors import InvalidParameter

TOPIC = f"{__name__}.topic"  # key of what `--help=` asks for, in a context's `meta`
HYPHEN = "\u2011"  # where no line may be broken, as in the name of a flag
MAX_NAMES = 26  # width of the column of names; a longer name has a line of its own


class App(typer.Typer):
    """A Typer whose help is plain text, in which no name is ever cut."""

    def __init__(self, **settings: Any):
        super().__init__(cls=CommandGroup, rich_markup_mode=None, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any) -> Any:
        return super().command(name, cls=cls or CliCommand, **settings)


class CommandGroup(TyperGroup):
    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the commands under their headings, each with its first sentence."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(limit=1000)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CliCommand(TyperCommand):
    """A command with vLLM's spellings of `--help`: of many flags it shows the common ones and the names of groups,
    `--help=GROUP` a group, `--help=WORD` the flags whose names contain the word, and `--help=all` everything."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        for word in args:
            if word.startswith("--help="):
                if topic := word.removeprefix("--help=").lower():
                    ctx.meta[TOPIC] = topic
                args = ["--help"]
        return super().parse_args(ctx, args)

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return super().get_help(ctx).replace(HYPHEN, "-")

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help that is asked for. Raises InvalidParameter for an unknown group or flag."""
        if (topic := ctx.meta.get(TOPIC, "all")) == "all":
            super().format_help(ctx, formatter)
            return
        sections = self._sections(ctx)
        found = {name: flags for name, flags in sections.items() if name.lower() == topic}
        if not found:
            named = [flag for flags in sections.values() for flag in flags if _is_named(flag, topic)]
            if not named:
                limit = f"all, a group ({', '.join(sections)}), or a part of a flag's name"
                raise InvalidParameter("--help", topic, limit)
            found = {f"Flags with {topic!r} in their name": named}
        _write(ctx, formatter, found)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write all sections; or, unless all are asked for, the common flags in place of groups, and their names."""
        sections = self._sections(ctx)
        groups = {} if TOPIC in ctx.meta else {name: about for name, (about, _) in GROUPS.items() if name in sections}
        grouped = {flag.name: flag for name in groups for flag in sections.pop(name)}
        if groups:
            sections["Common flags"] = [grouped[name] for name in COMMON if name in grouped]
        _write(ctx, formatter, sections)
        if groups:
            with formatter.section("Groups of flags"):
                formatter.write_dl(list(groups.items()))
            formatter.write_paragraph()
            formatter.write_text(
                f"`{ctx.command_path} --help=GROUP` explains a group, `--help=all` all flags, and `--help=WORD` those "
                "whose names contain a word."
            )

    def _sections(self, ctx: typer.Context) -> dict[str, list[Any]]:
        """Return arguments and options by their heading; GROUPS come last, in their order."""
        sections: dict[str, list[Any]] = {}
        for parameter in sorted(self.get_params(ctx), key=_place):
            sections.setdefault(_heading(parameter), []).append(parameter)
        return sections


def _heading(parameter: Any) -> str:
    default = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return getattr(parameter, "rich_help_panel", None) or default


def _place(parameter: Any) -> int:
    return [*GROUP_OF].index(parameter.name) if _heading(parameter) in GROUPS else -1


def _is_named(parameter: Any, word: str) -> bool:
    """Return whether a word, with dashes or underscores, is in a name of a flag."""
    return any(word.replace("_", "-") in name for name in (*parameter.opts, *parameter.secondary_opts))


def _write(ctx: typer.Context, formatter: Any, sections: dict[str, list[Any]]) -> None:
    for heading, parameters in sections.items():
        records = filter(None, (parameter.get_help_record(ctx) for parameter in parameters))
        rows = [(typer.style(names, bold=True), text.replace("-", HYPHEN)) for names, text in records]
        with formatter.section(heading):
            formatter.write_dl(rows, col_max=MAX_NAMES)
