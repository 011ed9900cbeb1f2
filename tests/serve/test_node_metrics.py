"""The metrics of one node, as endpoint pickers and a scrape of all pods ask for them: two nodes, a replica on each."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from deployments.http.server_header import NODE_HEADER
from tests.models import make_model
from tests.scrape import Scrape, Series
from tests.serve.chaos_cluster import MODEL, ChaosCluster
from tests.serve.serve_run import wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS, LENGTHS = "vllm:generation_tokens_total", (3, 5, 7)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ChaosCluster]:
    folder = make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    decode = {"num_replicas": 2, "num_cpus": 0.8}
    with ChaosCluster([{"num_cpus": 1}, {"num_cpus": 1}]) as cluster:
        model = {"name": MODEL, "model": str(folder), "engine": {"num_threads": 1}, "decode": decode}
        cluster.put({"models": [model], "ingress": {"num_replicas": 2, "num_cpus": 0.1}}, [])
        cluster.wait_until_running({"decode": 2})
        yield cluster


def scrape(url: str, **headers: str) -> Scrape:
    return Scrape(httpx.get(url, headers=headers, timeout=60).raise_for_status().text)


def ingress_urls(cluster: ChaosCluster) -> list[str]:
    """Those at which HAProxy asks them."""
    ports = {c.laddr.port for pid in cluster.pids("ingress") for c in psutil.Process(pid).net_connections("tcp")
             if c.status == psutil.CONN_LISTEN and 30_000 <= c.laddr.port <= 31_000}  # fmt: skip
    return [f"http://127.0.0.1:{port}" for port in sorted(ports)]


def owned(one: Series) -> bool:
    """Whether it is of an engine or an ingress, and not of a model."""
    return bool({"engine", "ingress"} & one.labels.keys())


def names(found: Scrape) -> list[str]:
    return sorted(f"{one.name}{sorted(one.labels.items())}" for one in found.series if owned(one))


def test_a_scrape_of_all_nodes_has_each_series_once_and_the_proxys_node_is_told_through_any_ingress(cluster):
    for number in LENGTHS:
        body = {"model": MODEL, "prompt": "An ocean is", "max_tokens": number, "ignore_eos": True}
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    wait_until(lambda: scrape(f"{cluster.url}/metrics").sum(TOKENS) == sum(LENGTHS))
    homes, urls = {replica.node for replica in cluster.replicas("decode")}, ingress_urls(cluster)
    assert len(homes) == len(urls) == 2
    by_node = [scrape(f"{url}/metrics/node", **{NODE_HEADER: node}) for url, node in zip(urls, homes, strict=True)]
    assert sorted(name for each in by_node for name in names(each)) == names(scrape(f"{cluster.url}/metrics"))
    assert [each.sum("manta_up") for each in by_node] == [1, 1]
    assert sum(each.sum(TOKENS) for each in by_node) == sum(LENGTHS)

    through_proxy = [names(scrape(f"{cluster.url}/metrics/node", **{NODE_HEADER: "forged"})) for _ in range(8)]
    assert through_proxy[0] in [names(each) for each in by_node], "HAProxy's node has one of the replicas"
    assert all(each == through_proxy[0] for each in through_proxy), "whichever ingress was asked"
