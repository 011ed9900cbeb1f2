"""Queries of the dashboard, the alerts and docs/debugging.md find series in a real scrape, by name, label and value.

What cannot run here, the operator and kube-state-metrics, is taken from its documentation.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.util.metrics import Counter, Metric

from cluster.autoscaling.policy import ScalingMetrics
from tests.cluster.haproxy_process import needs_haproxy, running
from tests.deployments.real_api import real_api_with_prefill
from tests.k8s.overlays import ROOT, needs_kustomize, of_kind, ray_groups, rendered
from tests.k8s.rules.selectors import selects
from tests.models import make_model
from tests.scrape import Scrape, Series

MONITORING = ROOT / "k8s" / "components" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana_dashboard.json").read_text())
ALERTS = [
    rule
    for file in ("alerts.yaml", "cluster_alerts.yaml")
    for group in yaml.safe_load((MONITORING / file).read_text())["spec"]["groups"]
    for rule in group["rules"]
]
RUNBOOK = ROOT / "docs" / "alerts.md"
DEBUGGING = re.findall(r"`((?:histogram_quantile|rate|sum)\b[^`]*)`", (ROOT / "docs" / "debugging.md").read_text())
POD = {"namespace": "manta", "pod": "manta-x1-head-y2", "container": "ray", "job": "manta/manta", "endpoint": "serve"}
# docs.ray.io, "KubeRay metrics references"; github.com/kubernetes/kube-state-metrics, docs/metrics
ELSEWHERE = [
    Series(f"kuberay_service_condition_{condition}", {**POD, "name": "manta", "uid": "u", "condition": value}, 1.0)
    for condition in ("ready", "upgrade_in_progress")
    for value in ("true", "false")
] + [
    Series("kube_pod_status_phase", {"namespace": "manta", "pod": POD["pod"], "uid": "u", "phase": "Pending"}, 0.0),
    Series("kube_statefulset_status_replicas_ready", {"namespace": "manta", "statefulset": "manta-redis"}, 1.0),
]
VARIABLES = {"$__rate_interval": "1m", "$model_name": "tiny"}  # as Grafana puts them in

pytestmark = [needs_kustomize, needs_haproxy]

OPS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}


@dataclass(frozen=True, slots=True)
class Query:
    """of: the panel or alert, or the query itself. labels: those that its legend or text names."""

    of: str
    expr: str
    labels: tuple[str, ...]


def queries() -> list[Query]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    found = [
        Query(panel["title"], target["expr"], labels_in(target["legendFormat"], r"\{\{\s*(\w+)\s*\}\}"))
        for panel in panels
        for target in panel["targets"]
    ]
    for alert in ALERTS:
        text = " ".join(alert["annotations"].values())
        found.append(Query(alert["alert"], alert["expr"], labels_in(text, r"\$labels\.(\w+)")))
    return found + [Query(expr, expr, ()) for expr in DEBUGGING]


def labels_in(text: str, pattern: str) -> tuple[str, ...]:
    return tuple(re.findall(pattern, text))


def parse(expr: str) -> Any:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, "a variable that Grafana does not know here"
    return promql.parse(expr)


def walk(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from walk(child)
    for child in getattr(node, "args", []) or []:
        yield from walk(child)


def selected(node: Any, scrape: Scrape) -> list[Series]:
    """Return the series that a selector finds."""
    matchers = [(matcher.name, OPS[str(matcher.op)], matcher.value) for matcher in node.matchers.matchers]
    return scrape.select(node.name, matchers)


def selectors(node: Any) -> list[Any]:
    return [found for found in walk(node) if isinstance(found, promql.VectorSelector)]


def result_labels(node: Any, scrape: Scrape) -> set[str]:
    """Labels of what the query returns."""
    match node:
        case promql.AggregateExpr():
            return set(node.modifier.labels) if node.modifier else set()
        case promql.VectorSelector():
            return {label for series in selected(node, scrape) for label in series.labels}
        case promql.MatrixSelector():
            return result_labels(node.vector_selector, scrape)
        case promql.Call():
            return result_labels(node.args[-1], scrape)
        case promql.BinaryExpr():
            return result_labels(node.rhs if isinstance(node.lhs, promql.NumberLiteral) else node.lhs, scrape)
        case promql.ParenExpr():
            return result_labels(node.expr, scrape)
        case promql.NumberLiteral():
            return set()
    raise AssertionError(f"{type(node).__name__} is not known here")


def exported_by_ray() -> list[Series]:
    """What Serve's controller exports of the policy, for both pools. Ray gives names a prefix, and counters a suffix
    (tests/serve/test_autoscaling.py scrapes it)."""
    found = []
    for metric in vars(ScalingMetrics()).values():
        if isinstance(metric, Metric):
            name = f"ray_{metric.info['name']}" + "_total" * isinstance(metric, Counter)
            labels = {**dict.fromkeys(metric.info["tag_keys"], "any"), "model_name": "tiny"}
            found += [Series(name, {**labels, "pool": pool}, 1.0) for pool in ("decode", "prefill")]
    return found


def exported_by_serve() -> list[Series]:
    """What Serve's controller and replicas register, by their source. Histograms have a count."""
    found = []
    for file in (Path(serve.__file__).parent / "_private").glob("*.py"):
        tree = ast.parse(file.read_text())
        assigned = {ast.unparse(t): n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            kind, (first, *_) = ast.unparse(call.func).rpartition(".")[2], (*call.args, None)
            if kind not in ("Gauge", "Histogram") or not isinstance(first, ast.Constant):
                continue
            keys = next((keyword.value for keyword in call.keywords if keyword.arg == "tag_keys"), None)
            keys = assigned.get(ast.unparse(keys), keys) if keys is not None else ast.Tuple([])
            labels = {node.value: "any" for node in ast.walk(keys) if isinstance(node, ast.Constant)}
            suffix = "_count" * (kind == "Histogram")
            found.append(Series(f"ray_{first.value}{suffix}", {str(label): "any" for label in labels}, 1.0))
    return found


def targets() -> list[Series]:
    """Return `up` of all that the PodMonitors of an overlay find, with the labels that Prometheus gives it."""
    manifests = rendered(ROOT / "k8s" / "overlays" / "single-gpu")
    found = []
    for monitor in of_kind("PodMonitor", manifests):
        job = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
        for name, group in ray_groups(manifests).items():
            if not selects(monitor["spec"]["selector"], group["template"]["metadata"]["labels"]):
                continue
            ports = {port["name"] for port in group["template"]["spec"]["containers"][0]["ports"]}
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] in ports:
                    pod = {"pod": f"manta-x1-{name}-y2", "job": job, "endpoint": endpoint["port"]}
                    found.append(Series("up", POD | pod, 1.0))
    return found


@pytest.fixture(scope="module")
def scrape(tmp_path_factory) -> Scrape:
    """After one good and one bad request, to a model with a prefill engine, and one that HAProxy answered itself.

    With the series of the policy, of Serve, and of what else runs in a cluster.
    """

    async def scenario() -> Scrape:
        async with real_api_with_prefill(make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)) as api:
            await api.complete(prompt=list(range(5, 45)), max_tokens=4)
            await api.client.post("/v1/completions", json={"prompt": ""})
            return await api.scrape_when(lambda scrape: scrape.sum("vllm:request_prompt_tokens_count") == 1)

    found = asyncio.run(asyncio.wait_for(scenario(), 60))
    with running({}) as (url, metrics_url, _):
        assert httpx.post(f"{url}/v1/completions", json={}).status_code == 503
        found.series += Scrape(httpx.get(metrics_url).text).series
    found.series += exported_by_ray() + exported_by_serve()
    found.series = [Series(one.name, POD | one.labels, one.value) for one in found.series]
    found.series += targets() + ELSEWHERE
    return found


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.of)
def test_query_selects_series_that_a_server_has(query, scrape):
    found = selectors(parse(query.expr))
    assert found
    for selector in found:
        assert selected(selector, scrape), f"{selector.prettify()} finds nothing"


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.of)
def test_query_aggregates_and_joins_by_labels_that_its_series_have(query, scrape):
    tree = parse(query.expr)
    for node in walk(tree):
        if getattr(node, "modifier", None) is None:
            continue
        if isinstance(node, promql.AggregateExpr):
            named, below = set(node.modifier.labels), [node.expr]
        else:
            named, below = set(node.modifier.matching.labels), [node.lhs, node.rhs]
        for side in below:
            assert named <= result_labels(side, scrape), node.prettify()
    assert set(query.labels) <= result_labels(tree, scrape)


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.of)
def test_query_compares_sides_that_have_the_same_labels(query, scrape):
    """Unless it says by which labels: Prometheus finds no pair otherwise, and no alert ever fires."""
    for node in walk(parse(query.expr)):
        if isinstance(node, promql.BinaryExpr) and (node.modifier is None or node.modifier.matching is None):
            left, right = result_labels(node.lhs, scrape), result_labels(node.rhs, scrape)
            numbers = [side for side in (node.lhs, node.rhs) if isinstance(side, promql.NumberLiteral)]
            assert numbers or left == right, node.prettify()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_says_how_severe_it_is_and_where_its_runbook_stands(alert):
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{alert['alert'].lower()}"


def test_runbook_has_a_section_for_every_alert_and_no_other():
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]


def test_application_that_failed_to_deploy_has_the_status_that_the_alert_compares_with(scrape):
    (expr,) = [alert["expr"] for alert in ALERTS if alert["alert"] == "MantaDeployFailed"]
    assert expr == f"ray_serve_application_status == {ApplicationStatus.DEPLOY_FAILED.to_numeric()}"


def test_answers_that_haproxy_gives_itself_count_as_its_errors(scrape):
    assert scrape.sum("haproxy_frontend_http_responses_total", proxy="http_frontend", code="5xx") == 1


def test_quantiles_keep_the_buckets_apart():
    for query in queries():
        for node in walk(parse(query.expr)):
            if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
                assert "le" in node.args[1].modifier.labels, query.of


def test_the_checks_see_what_is_wrong(scrape):
    assert not selected(parse('vllm:request_success_total{finished_reason="nonsense"}'), scrape)
    assert not selected(parse("vllm:no_such_metric"), scrape)
    assert result_labels(parse("sum by (engine) (rate(vllm:num_preemptions_total[1m]))"), scrape) == {"engine"}
    assert "engine" not in result_labels(parse("rate(vllm:request_success_total[1m]) > 0"), scrape)
    with pytest.raises(ValueError, match="unclosed"):
        parse("sum by (")


def test_the_variables_of_the_dashboard_come_from_a_series_that_is_always_there(scrape):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model_name"}
    metric, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variables["model_name"]["query"]["query"]).groups()
    assert {series.labels[label] for series in scrape.select(metric, [])} == {"tiny"}


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
