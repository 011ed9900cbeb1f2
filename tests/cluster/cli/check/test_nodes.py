from __future__ import annotations

import socket

import pytest

from cluster.cli.check import doctor, nodes
from engine.errors import StartupError


def test_a_cluster_that_takes_the_connection_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(nodes, "ANSWER_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"no Ray cluster answers at {address}: no answer within"):
            nodes.find_nodes(address)


def test_an_address_without_a_cluster_is_refused_in_one_line():
    with pytest.raises(StartupError, match=r"no Ray cluster answers at nowhere: .*\Z"):
        nodes.find_nodes("nowhere")


def test_a_silent_cluster_that_nobody_named_is_a_warning_and_this_machine_is_examined(monkeypatch):
    def silent(_: str | None) -> None:
        raise StartupError("no Ray cluster answers")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "find_nodes", silent)
    found = list(doctor.examine(None, None))
    assert [finding.message for finding in found if finding.level == "warning"] == ["no Ray cluster answers"]
    assert any(finding.topic == "this machine" for finding in found)
    with pytest.raises(StartupError, match="no Ray cluster answers"):
        list(doctor.examine(None, "10.0.0.1:6379"))
