"""Each part of the edge can be deleted, with those that need it: chats are answered without it."""

from __future__ import annotations

import subprocess

import pytest

from deployments.parts.table import PARTS, spec_of
from tests.left_out import command

CHATS = ["tests/deployments/test_app.py", "-k", "chat or stream or choices or stop or logprobs"]


def with_those_that_need(part: str) -> list[str]:
    names = {part}
    while more := {name for name in PARTS if names & set(spec_of(name).needs)} - names:
        names |= more
    return sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_chats_are_answered_without_a_part(part: str) -> None:
    packages = [f"deployments.parts.{name}" for name in with_those_that_need(part)]
    tests = [*CHATS, "-p", "deployments.ingress"]  # imports it, as clusters do
    left_out = command(["deployments.parts.table"], packages, tests)
    done = subprocess.run(left_out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
