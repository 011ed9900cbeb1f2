"""Every query of the dashboard and of the alerts finds series in a real scrape, by name, by label and by value."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from ray.util.metrics import Counter, Metric

from cluster.autoscaling.policy import ScalingMetrics
from tests.deployments.real_api import real_api_with_prefill
from tests.models import make_model
from tests.scrape import Scrape, Series

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana_dashboard.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"][0]["rules"]
VARIABLES = {"$__rate_interval": "1m", "$model_name": "tiny"}  # as Grafana puts them in
OPS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}


@dataclass(frozen=True, slots=True)
class Query:
    """of: the panel or alert. labels: those that its legend or text names."""

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
    return found


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
            return result_labels(node.lhs, scrape)
        case promql.ParenExpr():
            return result_labels(node.expr, scrape)
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


@pytest.fixture(scope="module")
def scrape(tmp_path_factory) -> Scrape:
    """After one good and one bad request, to a model with a prefill engine. With the policy's series."""

    async def scenario() -> Scrape:
        async with real_api_with_prefill(make_model(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)) as api:
            await api.complete(prompt=list(range(5, 45)), max_tokens=4)
            await api.client.post("/v1/completions", json={"prompt": ""})
            return await api.scrape_when(lambda scrape: scrape.sum("vllm:request_prompt_tokens_count") == 1)

    found = asyncio.run(asyncio.wait_for(scenario(), 60))
    found.series += exported_by_ray()
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
