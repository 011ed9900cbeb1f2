"""Whatever is changed under 1,000 requests: none fails, and each text is that of one model.

`pytest -s` prints what each change took.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_model
from tests.serve.chaos_cluster import MODEL, STARTUP_S, ChaosCluster, kill
from tests.serve.chaos_load import Loaded, run_load
from tests.serve.chaos_streams import run_streams
from tests.serve.serve_run import wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy for Linux only"),
]

REQUESTS = 1000
DEATHS = 2  # after which Ray's default ends a change
WORDS = ["ocean", "lamp", "winter", "dog", "music", "river", "stone", "letter", "paper"]
GREEDY = {"temperature": 0, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    *({"prompt": f"The {word} is", "max_tokens": 8, **GREEDY} for word in WORDS),
    *({"prompt": f"A {word} was", "max_tokens": 200, **GREEDY} for word in WORDS[:2]),
]
LONG = [{**body, "max_tokens": 3000} for body in BODIES]
IN_FRONT = {"HAProxy": {}, "Serve's proxy": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}


class Serving:
    """A server whose configuration changes; each method puts a new one and waits until it is in force."""

    def __init__(self, cluster: ChaosCluster, folders: list[Path], what: str):
        self.cluster, self.folders, self.what = cluster, folders, what
        self.engine: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "num_gpu_blocks_override": 2048,
        }
        self.folder = folders[0]
        self.replicas = 2
        self.ingress_cpus = 0.1
        self.drain_s = 60.0

    def put(self, **changes: Any) -> None:
        """changes: of the attributes of this object."""
        self.ask_for(**changes)
        self.cluster.wait_until_running({"decode": self.replicas})

    def ask_for(self, **changes: Any) -> None:
        """As `put`, but returns at once."""
        for name, value in changes.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        decode = {"num_cpus": 0.2, "drain_s": self.drain_s}
        model = {"name": MODEL, "model": str(self.folder), "engine": self.engine, "decode": decode}
        # not in `args`, whose every change restarts everything
        deployments = [
            {"name": f"decode-{MODEL}", "num_replicas": self.replicas},
            {"name": "ingress", "ray_actor_options": {"num_cpus": self.ingress_cpus}},
        ]
        self.cluster.put({"models": [model]}, deployments)

    def change(self, what: str, *changes: dict[str, Any]) -> Loaded:
        """One after the other, under load."""

        def change() -> None:
            for one in changes:
                self.put(**one)

        found = run_load(self.cluster.url, BODIES, REQUESTS, change)
        print(
            f"\n| {what} | {self.what} | {len(found.answers)} | {len(found.problems)} | {found.slowest_s:.1f} "
            f"| {found.change_s:.0f} |"
        )
        assert not found.problems
        assert len(found.answers) >= REQUESTS
        return found

    def texts(self) -> list[str]:
        found = run_streams(self.cluster.url, BODIES)
        assert not found.problems
        return found.texts


@pytest.fixture(scope="module", params=IN_FRONT)
def serving(tmp_path_factory, request) -> Iterator[Serving]:
    folders = [
        make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True, seed=seed, max_position_embeddings=4096)
        for seed in range(2)
    ]
    cluster = ChaosCluster([{"num_cpus": 3}], IN_FRONT[request.param])
    try:
        serving = Serving(cluster, folders, request.param)
        serving.put()
        yield serving
    finally:
        (folders[0].parent / "ray.log").write_text("\n".join(cluster.cluster.log_lines()))
        cluster.stop()


def test_scaling_down_and_up_fails_no_request(serving):
    expected = serving.texts()
    found = serving.change("2, 1 and 2 replicas", {"replicas": 1}, {"replicas": 2})
    assert [found.texts(i) for i in range(len(BODIES))] == [{text} for text in expected]


def test_another_configuration_fails_no_request(serving):
    expected = serving.texts()
    found = serving.change("other engine options", {"engine": {**serving.engine, "max_num_seqs": 8}})
    assert [found.texts(i) for i in range(len(BODIES))] == [{text} for text in expected]


def test_a_change_is_completed_though_replicas_die_in_it(serving):
    def new() -> set[int]:
        return set(serving.cluster.pids(f"decode-{MODEL}")) - known

    known: set[int] = set()
    known |= new()
    serving.ask_for(engine={**serving.engine, "max_num_seqs": 7})
    for _ in range(DEATHS):
        wait_until(lambda: bool(new()), STARTUP_S)
        dead = new()
        kill(*dead)
        known |= dead
    serving.cluster.wait_until_running({"decode": serving.replicas})


def test_another_model_under_the_same_name_fails_no_request_and_mixes_no_text(serving):
    before = serving.texts()
    found = serving.change("other weights", {"folder": serving.folders[1]})
    after = serving.texts()
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert [found.texts(i) for i in range(len(BODIES))] == [set(texts) for texts in zip(before, after, strict=True)]


def test_another_ingress_fails_no_request(serving):
    expected = serving.texts()
    found = serving.change("other ingress options", {"ingress_cpus": serving.ingress_cpus + 0.01})
    assert [found.texts(i) for i in range(len(BODIES))] == [{text} for text in expected]


def test_streams_that_outlast_their_drain_go_on_in_another_replica(serving):
    expected = run_streams(serving.cluster.url, LONG)
    assert not expected.problems
    serving.put(drain_s=0.5)
    before = serving.cluster.replays()
    options = {**serving.engine, "max_num_seqs": 9}
    found = run_streams(serving.cluster.url, LONG, lambda: serving.put(engine=options))
    assert not found.problems
    assert found.texts == expected.texts
    assert found.running == len(LONG)
    assert serving.cluster.replays() > before


def test_streams_that_outlast_their_drain_are_not_continued_by_other_weights(serving):
    """They end with an error, as nobody else could go on with them; whoever asks anew is served."""
    serving.put(drain_s=0.5)
    expected = run_streams(serving.cluster.url, LONG)
    (other,) = [folder for folder in serving.folders if folder != serving.folder]
    found = run_streams(serving.cluster.url, LONG, lambda: serving.put(folder=other))
    assert not found.short_problems
    for stream, text in zip(found.streams, expected.texts, strict=True):
        assert text.startswith(stream.text)
        assert stream.problem is None or "other_model" in stream.problem
    assert any(stream.problem for stream in found.streams)
