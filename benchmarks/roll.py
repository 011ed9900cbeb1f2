"""Streams while replicas are replaced by those of another version of Manta in one Ray cluster, and back.

It starts a cluster of fake nodes, half of which have a planted next version. On the way there it turns back in the
middle, and kills a replica of each version in each pool. It fails if a stream fails, if a text is neither version's and
does not say where it went on with other numerics, if something that was stored cannot be read, or if a budget has not
what the streams have cost.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from tests.serve.roll import Roll
from tests.serve.version_cluster import VersionCluster


def main(
    streams: Annotated[int, typer.Option(help="Under both rolls together, at least.")] = 2000,
    tokens: Annotated[int, typer.Option(help="Of each stream.")] = 48,
    clients: Annotated[int, typer.Option(help="Streams at a time.")] = 16,
    same_numerics: Annotated[bool, typer.Option(help="The next version computes as this one.")] = False,
    split: Annotated[bool, typer.Option(help="Prompts have a pool of their own.")] = False,
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        VersionCluster(Path(folder), same_numerics=same_numerics, split=split) as cluster,
    ):
        Roll(cluster, tokens, clients).run(streams // 2)


if __name__ == "__main__":
    run(main)
