"""`manta k8s lint --before OLD`: what it takes to go from one rendering of a RayService to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from cluster.cli.lint.change import change_of
from cluster.cli.lint.manifests import Group, Manifest, Service
from cluster.cli.lint.pods import Pods, gpus, name_of, pods_of
from cluster.terminal.tables import make_table
from engine.errors import StartupError

MOST_REASONS = 5
DEFAULT_IDLE_S = 60  # KubeRay's
SENTENCES = {
    "nothing": "its RayCluster stays as it is",
    "in place": "its RayCluster changes in place: KubeRay appends {appended}",
    "second cluster": "KubeRay starts a second RayCluster and moves all requests at once, because of",
    "in steps": "KubeRay starts a second RayCluster and moves requests in steps, because of",
    "refused": "KubeRay leaves its RayCluster as it is, since upgradeStrategy.type allows no second one for",
}


def costs(old: Sequence[Manifest], new: Sequence[Manifest]) -> list[str | Table]:
    """Return what each RayService that both have costs in pods while it changes. Raises StartupError if there is none,
    or if its Serve configuration is broken."""
    services = {manifest["metadata"]["name"]: Service(manifest, new) for manifest in _services(new)}
    pairs = [(Service(manifest, old), services.get(manifest["metadata"]["name"])) for manifest in _services(old)]
    lines = [line for was, now in pairs if now is not None for line in _told(was, now)]
    if not lines:
        raise StartupError(f"no RayService is in both: before {[was.name for was, _ in pairs]}, now {[*services]}")
    return lines


def _services(manifests: Sequence[Manifest]) -> Iterator[Manifest]:
    yield from (manifest for manifest in manifests if manifest["kind"] == "RayService")


def _told(old: Service, new: Service) -> Iterator[str | Table]:
    change = change_of(old, new)
    yield f"{new.name}: {SENTENCES[change.way].format(appended=', '.join(change.appended))}"
    yield from (f"  {reason}" for reason in change.reasons[:MOST_REASONS])
    if more := change.reasons[MOST_REASONS:]:
        yield f"  and {len(more)} more"
    if change.unapplied:
        yield f"not applied until a worker group is appended or a second cluster starts: {', '.join(change.unapplied)}"
    if change.reconfigured:
        yield "Serve gets another configuration, and replaces replicas one after the other"
    yield _table(pods_of(old, new, change), [*old.groups, *new.groups])
    if change.way == "in place" and change.reconfigured and new.autoscales:
        idle = (new.cluster.get("autoscalerOptions") or {}).get("idleTimeoutSeconds", DEFAULT_IDLE_S)
        yield f"more during it where there is room: a pod goes {idle} s after its last replica (idleTimeoutSeconds)"


def _table(pods: Pods, groups: Sequence[Group]) -> Table:
    columns = (pods.before, pods.during, pods.after)
    table = make_table("pods at most", "before", "during", "after")
    for name in dict.fromkeys(map(name_of, groups)):
        table.add_row(name, *(str(column[name]) for column in columns))
    table.add_row("all", *(str(column.total()) for column in columns))
    table.add_row("GPUs", *(str(gpus(column, groups)) for column in columns))
    return table
