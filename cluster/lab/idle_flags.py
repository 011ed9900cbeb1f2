"""Flags that would be ignored because of others, or because others are not given."""

from __future__ import annotations

from pathlib import Path

from cluster.config.idle_flags import given_flags, refuse_idle
from cluster.config.simulation_options import SimulationOptions
from cluster.lab.simulator.trace import is_file


def check_simulate(options: SimulationOptions, plan: bool, max_gpus: int | None, html: Path | None) -> None:
    """Raise InvalidParameter for a flag of `manta simulate` that would be ignored."""
    given = given_flags(options) | {"--max-gpus": max_gpus, "--html": html}
    fixed = "with --plan, because planned clusters have a fixed"
    searched = "with --plan, which searches it"
    card_count = "unless --plan chooses the cards of a replica, which it does without --tensor-parallel-size or --cost"
    chooses_cards = plan and options.tensor_parallel_size is None and options.cost is None
    sends = options.prefill_replicas > 0 or (options.autoscale is not None and options.move_requests)
    _check(options, given)
    refuse_idle(
        given,
        ("--autoscale", plan, f"{fixed} size"),
        ("--switch-roles", plan, f"{fixed} split"),
        ("--html", plan, "with --plan, which has no single run to show"),
        ("--replicas", plan, searched),
        ("--max-gpus --good", not plan, "without --plan"),
        ("--cards-per-node", not chooses_cards, card_count),
        ("--network-gbit", not (sends or chooses_cards), "for one pool, if no requests move between its replicas"),
        ("--startup-s", options.autoscale is None, "without --autoscale, which starts replicas"),
        (
            "--seed",
            not _draws(options) and options.router not in ("random", "power_of_two"),
            "for the times of a file, unless --router is random or power_of_two",
        ),
        (
            "--no-move-requests",
            options.autoscale is None or options.prefill_replicas > 0,
            "unless --autoscale may end replicas of a single pool",
        ),
    )


def check_tune(options: SimulationOptions, objective: str, has_tape: bool) -> None:
    """Raise InvalidParameter for a flag of `manta tune` that would be ignored, with a tape or without."""
    given, fixed = given_flags(options), "because `manta tune` compares clusters of fixed sizes"
    _check(options, given)
    refuse_idle(
        given,
        ("--autoscale --switch-roles --startup-s --no-move-requests", True, fixed),
        ("--cards-per-node", True, "because `manta tune` does not change the cards of a replica"),
        ("--good", objective != "cost", "without --objective cost"),
        ("--seed", has_tape and not _draws(options), "with --tape, unless --trace is drawn"),
    )


def _draws(options: SimulationOptions) -> bool:
    """Return whether requests, or their times, are drawn."""
    return options.burstiness is not None or not is_file(options.trace)


def _check(options: SimulationOptions, given: dict[str, object]) -> None:
    refuse_idle(
        given,
        ("--disk-gbit", options.kv_offloading_disk_size is None, "without --kv-offloading-disk-size"),
        ("--store-gbit", options.kv_offloading_store_size is None, "without --kv-offloading-store-size"),
    )
