"""No record crosses a border between processes or versions without being held to the rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from cluster.versions.borders import BETWEEN_RANKS, forms
from tests.imports import ROOT, statements

PACKAGES = ("engine", "placement", "deployments", "cluster")
WITHIN_AN_ENGINE = {
    "AdapterLoad", "Attach", "DropBlocks", "DropSource", "KVWorkerInfo", "LoadBlocks", "Message", "Notice",
    "PlanMessage", "RankRefusals", "RankTask", "Read", "ReadEnded", "Records", "StepResult", "StopLoad", "StopRead",
    "StoreBlocks",
}  # fmt: skip
"""What ranks, an engine and its replica send each other: they are of one version (placement/rank_group.py)."""
OF_ONE_VERSION = {"AnyGraph", "CommitDetails", "Ended", "Input", "ObjectGraph"}
"""The state and the inputs on a tape, which only those open who know the digest of their classes."""
NOT_EXCHANGED = {
    "ChatAnswer", "Compared", "Earlier", "Entry", "Measured", "StreamChunk", "TensorHeader", "UserId", "WellKnown",
}  # fmt: skip
"""Files and answers of others, and files that a command writes for itself."""
FOR_COMMANDS = {"ClusterState", "RequestTimeline", "SessionBody", "VersionDescription"}
"""What `manta top` and `manta explain` read from a server, and what `manta check` reads."""
BASES = {"Command"}
KIND_AT = {"Decoder": 0, "ask": 1, "ask_one": 1, "Records": 2, "PullSocket": 2}
"""Calls that are given the kind of what they decode, and at which place."""
DECODES = re.compile(rf"\btype=|\b({'|'.join(KIND_AT)})\b")


def read_in(tree: ast.AST, cls: str = "cls") -> Iterator[str]:
    """Names in what a file says about the types of the bytes that it decodes. cls: what `cls` stands for."""
    for node in ast.iter_child_nodes(tree):
        yield from read_in(node, node.name if isinstance(node, ast.ClassDef) else cls)
    if isinstance(tree, ast.Call):
        name = tree.func.attr if isinstance(tree.func, ast.Attribute) else ast.unparse(tree.func).partition("[")[0]
        given = [keyword.value for keyword in tree.keywords if keyword.arg == "type"]
        if name in KIND_AT:
            given += tree.args[KIND_AT[name] :][:1]
        for each in [node.id for one in given for node in ast.walk(one) if isinstance(node, ast.Name)]:
            yield cls if each == "cls" else each


@dataclass
class Said:
    """What our sources say. read: types of what is decoded. unions: members by name. bases: of each class."""

    read: set[str] = field(default_factory=set)
    unions: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)


@cache
def said() -> Said:
    found = Said()
    for file in [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]:
        text = file.read_text(encoding="utf-8")
        tree, *inside = statements(text)
        assert isinstance(tree, ast.Module)
        for node in inside:
            if isinstance(node, ast.ClassDef):
                found.bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                members = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
                found.unions |= {target.id: members for target in node.targets[:1] if isinstance(target, ast.Name)}
        if DECODES.search(text):
            found.read.update(read_in(tree))
    return found


def test_whatever_a_process_decodes_is_held_to_the_rules_or_is_named_here():
    found, unions = said().read, said().unions
    found = found.union(*(unions[name] for name in found & unions.keys())) & said().bases.keys()
    assert {"TokenBatch", "JobRecord", "BatchRecord", "Envelope", "EngineTape", "HeldPrompts"} <= found
    private = {name for name in found if name.startswith("_")}
    known = {name.partition("[")[0] for name in forms()}
    assert found - private - known == WITHIN_AN_ENGINE | OF_ONE_VERSION | NOT_EXCHANGED | FOR_COMMANDS | BASES


def below(bases: set[str], of_class: dict[str, set[str]]) -> set[str]:
    """Names of the classes that derive from one of these."""
    found = {name for name, of in of_class.items() if of & bases}
    return found | below(found, of_class) if found else found


def test_no_kind_of_command_question_or_record_of_a_part_is_left_out():
    of_class, between_ranks = said().bases, {kind.__name__ for kind in BETWEEN_RANKS}
    kinds = below({"Command", "PartRecord", "ReplicaQuestion"}, of_class) - {"Question"}
    assert kinds - between_ranks - below(between_ranks, of_class) - forms().keys() == set()
