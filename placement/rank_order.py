"""Determines the order in which the bundles of a replica's placement group become ranks, and where the ranks meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Node and devices that Ray has given to the actor of one bundle."""

    node: str  #: Ray's node id
    devices: tuple[str, ...] = ()  #: GPUs that the actor may use, as in CUDA_VISIBLE_DEVICES
    host: str = ""  #: the node's address

    def __str__(self) -> str:
        gpus = f" GPU {','.join(self.devices)}" if self.devices else ""
        return f"{self.host} (node {self.node[:8]}){gpus}"


def rank_order(locations: Sequence[RankLocation], home: str) -> list[int]:
    """Return bundle indices in rank order: ranks of one node are adjacent, in the order of their devices.

    locations: one per bundle. home: the control actor's node, which comes first if any bundle is there.
    Ray guarantees neither property: with PACK, adjacent bundles may be on different nodes, and devices are in no
    particular order.
    """
    first_bundle: dict[str, int] = {}
    for bundle, location in enumerate(locations):
        first_bundle.setdefault(location.node, bundle)

    def key(bundle: int) -> tuple[bool, int, list[tuple[float, str]], int]:
        location = locations[bundle]
        return location.node != home, first_bundle[location.node], [_number(name) for name in location.devices], bundle

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
