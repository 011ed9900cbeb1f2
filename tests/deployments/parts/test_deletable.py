"""Each part of the edge can be deleted, with those that need it: chats are answered without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deployments.parts.table import PARTS

NOT_YET = {
    "adapters": "deployments/app.py and ingress.py import its table",
    "images": "deployments/ingress.py imports its options",
    "console": "deployments/app.py and ingress.py import its options",
}
"""Parts that something outside of the table imports. The list may only get shorter."""
CHATS = ["tests/deployments/test_app.py", "-k", "chat or stream or choices or stop or logprobs"]


def with_those_that_need(part: str) -> list[str]:
    names = {part}
    while more := {spec.name for spec in PARTS if names & set(spec.needs)} - names:
        names |= more
    return sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(spec.name, marks=pytest.mark.xfail(strict=True, reason=NOT_YET[spec.name]))
        if spec.name in NOT_YET
        else spec.name
        for spec in PARTS
    ],
)
def test_chats_are_answered_without_a_part(part: str) -> None:
    left_out = ",".join(with_those_that_need(part))
    # with -p, the ingress is imported too, which makes the parts in a cluster
    command = [
        sys.executable,
        "-m",
        "tests.left_out",
        "deployments.parts",
        left_out,
        *CHATS,
        "-p",
        "deployments.ingress",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_that_cannot_be_deleted_yet_are_parts() -> None:
    assert NOT_YET.keys() <= {spec.name for spec in PARTS}
