"""Determines the order in which the bundles of a replica's placement group become ranks, and where the ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RACK_LABELS = ("ray.io/region", "ray.io/availability-zone", "rack")
"""Ray labels of nodes that tell which are close to each other; the first two are Ray's own."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Node and devices that Ray has given to the actor of one bundle."""

    node: str  #: Ray's node id
    devices: tuple[str, ...] = ()  #: GPUs that the actor may use, as in CUDA_VISIBLE_DEVICES
    host: str = ""  #: the node's address
    rack: tuple[str | None, ...] = ()  #: values of the labels RACK_LABELS of the node

    def __str__(self) -> str:
        gpus = f" GPU {','.join(self.devices)}" if self.devices else ""
        rack = "/".join(filter(None, self.rack))
        return f"{self.host} (node {self.node[:8]}{f', rack {rack}' if rack else ''}){gpus}"


def rank_order(locations: Sequence[RankLocation], home: str) -> list[int]:
    """Return bundle indices in rank order: ranks of one rack are adjacent, among them those of one node, in the order
    of their devices.

    locations: one per bundle. home: the control actor's node, which comes first if any bundle is there.
    Ray guarantees none of this: with PACK, adjacent bundles may be on different nodes, and devices are in no particular
    order.
    """
    first_of_node: dict[str, int] = {}
    first_of_rack: dict[tuple[str | None, ...], int] = {}
    for bundle, location in enumerate(locations):
        first_of_node.setdefault(location.node, bundle)
        first_of_rack.setdefault(location.rack, bundle)
    for location in locations:
        if location.node == home:
            first_of_node[home] = first_of_rack[location.rack] = -1

    def key(bundle: int) -> tuple[int, int, list[tuple[float, str]], int]:
        location = locations[bundle]
        devices = [_number(name) for name in location.devices]
        return first_of_rack[location.rack], first_of_node[location.node], devices, bundle

    return sorted(range(len(locations)), key=key)


def meeting_host(hosts: Sequence[str]) -> str:
    """Return the address on which rank 0 listens for the others: loopback if all are on one machine.

    hosts: addresses of the ranks' nodes, in rank order.
    """
    if len(set(hosts)) > 1:
        return hosts[0]
    return "::1" if ":" in hosts[0] else "127.0.0.1"


def _number(device: str) -> tuple[float, str]:
    """Return a sort key that puts device 10 after device 9. Devices can also be UUIDs."""
    return (int(device) if device.isdigit() else float("inf")), device
