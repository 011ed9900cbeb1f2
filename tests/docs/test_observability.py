"""docs/observability.md: what a plain Prometheus scrapes, and the alerts that it evaluates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from cluster.entry_point import HOST, PORT
from cluster.server_ports import KNOWN_PORTS
from tests.docs.pages import block, run
from tests.k8s.overlays import needs_kustomize, ray_groups, rendered
from tests.k8s.test_monitoring import ALERTS, targets
from tools.site import ROOT

PAGE = "docs/observability.md"
Labels = dict[str, str]


def jobs(with_: str) -> list[dict[str, Any]]:
    return yaml.safe_load(block(PAGE, "yaml", with_=with_))["scrape_configs"]


def relabelled(labels: Labels, rules: list[dict[str, Any]]) -> Labels | None:
    """Return a target's labels as Prometheus makes them by `relabel_configs`; None if it is dropped."""
    for rule in rules:
        value = ";".join(labels.get(name, "") for name in rule["source_labels"])
        fits = re.fullmatch(rule.get("regex", "(.*)"), value)
        match rule.get("action", "replace"):
            case "replace" if fits:
                labels = labels | {rule["target_label"]: value}
            case "keep" if not fits:
                return None
            case "drop" if fits:
                return None
    return {name: value for name, value in labels.items() if not name.startswith("__")}


def pods() -> Iterator[Labels]:
    """The labels that Prometheus' discovery gives each port of each pod of an overlay; all pods are Ready."""
    for name, group in ray_groups(rendered(ROOT / "k8s" / "overlays" / "single-gpu")).items():
        labels = group["template"]["metadata"]["labels"].items()
        meta = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": value for key, value in labels}
        meta |= {
            "__meta_kubernetes_namespace": "manta",
            "__meta_kubernetes_pod_name": f"manta-x1-{name}-y2",
            "__meta_kubernetes_pod_ready": "true",
        }
        for container in group["template"]["spec"]["containers"]:
            meta["__meta_kubernetes_pod_container_name"] = container["name"]
            for port in container["ports"]:
                yield meta | {"__meta_kubernetes_pod_container_port_name": port["name"]}


@needs_kustomize
def test_a_plain_prometheus_finds_the_targets_of_the_pod_monitors_with_their_labels():
    found = [
        labels | {"job": job["job_name"]}
        for job in jobs("kubernetes_sd_configs")
        for pod in pods()
        if (labels := relabelled(pod, job["relabel_configs"])) is not None
    ]
    assert sorted(map(sorted, map(dict.items, found))) == sorted(sorted(series.labels.items()) for series in targets())


@needs_kustomize
def test_haproxy_of_a_pod_that_is_not_ready_is_not_scraped():
    (_, ray) = jobs("kubernetes_sd_configs")
    states = ("true", "false", "unknown")
    ready = {
        state: {
            labels["endpoint"]
            for pod in pods()
            if (labels := relabelled(pod | {"__meta_kubernetes_pod_ready": state}, ray["relabel_configs"]))
        }
        for state in states
    }
    assert [ready["true"] - ready[state] for state in states] == [set(), {"haproxy"}, {"haproxy"}]


def test_a_plain_prometheus_asks_a_servers_ports_and_the_alerts_find_its_job():
    manta, haproxy, _ = jobs("static_configs")
    (api,), (counts,) = manta["static_configs"], haproxy["static_configs"]
    assert api["targets"] == [f"{HOST}:{PORT}"]
    assert counts["targets"] == [f"{HOST}:{KNOWN_PORTS['RAY_SERVE_HAPROXY_METRICS_PORT'].number}"]
    (expr,) = [rule["expr"] for rule in ALERTS if rule["alert"] == "MantaDown"]
    down = re.search(r'job=~"(.*?)", endpoint="(.*?)"', expr)
    assert down is not None
    assert re.fullmatch(down[1], manta["job_name"]) and api["labels"]["endpoint"] == down[2]


def test_the_command_of_the_page_makes_a_file_of_rules_from_the_alerts(tmp_path):
    command = block(PAGE, "bash", with_="alerts.yaml").replace("k8s/", f"{ROOT}/k8s/")
    run(command, tmp_path)
    groups = yaml.safe_load((tmp_path / "manta_alerts.yaml").read_text())["groups"]
    made = [rule for group in groups for rule in group["rules"]]
    assert made and made == ALERTS[: len(made)]
