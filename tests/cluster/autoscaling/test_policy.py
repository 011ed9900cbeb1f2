"""The policy as Serve's controller has it: pickled by value, called with contexts, never raising."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.autoscaling import policy as policy_module
from cluster.autoscaling.policy import DECISION_INTERVAL_S, Policy
from cluster.autoscaling.slo import POLICY, Limits, PoolSettings, RoleSettings, Slo, autoscaling_config
from deployments import ray_compat
from deployments.replicas.scaling_report import ReplicaReport, ScalingChange, queue_report
from tests.docs.pages import block

pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")

LIMITS = Limits(
    min_replicas=1,
    max_replicas=4,
    max_num_seqs=10,
    upscale_delay_s=0.0,
    downscale_delay_s=5.0,
    scale_to_zero_delay_s=5.0,
)
DECODE, INGRESS = DeploymentID("decode-m", "manta"), DeploymentID("ingress", "manta")
IDLE = ReplicaReport(**dict.fromkeys(ReplicaReport.__dataclass_fields__, 0.0))


def series(before: dict[str, float], after: dict[str, float]) -> dict[str, dict[str, list[TimeStampedValue]]]:
    """Two reports of one replica, four seconds apart."""
    return {
        name: {"replica-1": [TimeStampedValue(10.0, before[name]), TimeStampedValue(14.0, after[name])]}
        for name in after
    }


def context(reports: Any, settings: PoolSettings | None, target: int = 1, queued: float = 0.0) -> SimpleNamespace:
    """The fields of Serve's AutoscalingContext that the policy reads."""
    return SimpleNamespace(
        current_num_replicas=1,
        target_num_replicas=target,
        raw_metrics=reports,
        total_queued_requests=queued,
        config=AutoscalingConfig(**autoscaling_config(1, 4, 10, settings)),
    )


def contexts(waiting: float = 0.0, queued: float = 0.0, **now: float) -> dict[DeploymentID, SimpleNamespace]:
    """now: what the decode replica reports in the end."""
    replica = series(IDLE.numbers(), {**IDLE.numbers(), "blocks_total": 100.0, **now})
    ingress = queue_report("m", waiting, 7 * waiting)
    settings = PoolSettings("m", "decode", Slo(), LIMITS)
    return {
        DECODE: context(replica, settings, queued=queued),
        INGRESS: context(series(ingress, ingress), None),
    }


@pytest.fixture
def policy(monkeypatch) -> Policy:
    """Every call is a second after the one before."""
    ticks = count(100.0, DECISION_INTERVAL_S)
    monkeypatch.setattr(policy_module.time, "monotonic", lambda: next(ticks))
    return Policy()


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines of the policy."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ray.serve.manta.autoscaling")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_serve_makes_the_policy_from_the_name_that_users_write():
    made = AutoscalingPolicy(policy_function=POLICY).get_policy()()
    decided, state = made(contexts())
    assert decided == {DECODE: 1, INGRESS: 1}
    assert state is None


@pytest.mark.parametrize("shown", [True, False])
def test_lines_are_on_the_console_also_where_serve_shows_none_of_its_own(monkeypatch, shown):
    monkeypatch.setattr(ray_compat, "serve_logs_to_console", lambda: shown)
    logger = logging.getLogger("ray.serve.manta.autoscaling")
    monkeypatch.setattr(logger, "handlers", [])
    Policy()
    streams = [getattr(handler, "stream", None) for handler in logger.handlers]
    assert streams == ([] if shown else [sys.__stderr__])
    assert logger.propagate, "Serve's files have the lines too"


def test_settings_come_back_from_what_serve_carries():
    settings = PoolSettings("m", "prefill", Slo(ttft_ms=7.0), LIMITS, replica_hour=2.5)
    config = AutoscalingConfig(**autoscaling_config(1, 4, 10, settings))
    assert PoolSettings.parse(config.policy.policy_kwargs) == settings
    assert config.policy.is_default_policy_function(), "or Serve would warn of two policies"


def test_what_waits_in_engines_in_ingresses_and_in_serve_counts(policy):
    assert policy(contexts(running=5.0, waiting=2.0))[0][DECODE] == 1
    assert policy(contexts(running=5.0, waiting=6.0))[0][DECODE] == 2
    assert policy(contexts(waiting=6.0, running=5.0))[0][DECODE] == 2
    assert policy(contexts(queued=5.2, running=5.0))[0][DECODE] == 2


def test_rates_are_what_totals_rose_by_within_what_serve_has_kept(policy, log):
    policy(
        contexts(
            running=20.0,
            prefill_tokens_total=2000.0,
            prefills_total=4.0,
            output_tokens_total=400.0,
            itl_s_total=2.0,
            itl_total=100.0,
            token_s=0.001,
        )
    )
    (line,) = [line for line in log if line.startswith("autoscaling decode-m")]
    inputs = dict(part.split("=") for part in line.split() if "=" in part)
    assert line.startswith("autoscaling decode-m from 1 to 2 replicas: reason=slots desired=3 ")
    assert float(inputs["output_tokens_per_s"]) == 100.0
    assert float(inputs["prefill_share"]) == 0.5  # 500 tokens per second, each a millisecond
    assert float(inputs["prompt_s"]) == 0.5
    assert float(inputs["itl_s"]) == 0.02
    shown = re.findall(r"(\w+)=", block("docs/autoscaling.md", "", with_="reason=slots"))  # of a pool that only decodes
    assert [name for name in inputs if not name.startswith(("ttft_of", "queue_of"))] == shown


def test_a_change_says_what_it_costs_and_saves_if_replicas_have_a_price(policy, log, monkeypatch):
    shared: list[bytes] = []
    monkeypatch.setattr(ray_compat, "share", lambda name, value: shared.append(value))
    settings = PoolSettings("m", "decode", Slo(), LIMITS, replica_hour=4.2)
    given = contexts(running=15.0)
    given[DECODE].config = AutoscalingConfig(**autoscaling_config(1, 4, 10, settings))
    policy(given)
    assert log[0].endswith(" cost_per_hour=8.40 saved_per_hour=-4.20")
    (change,) = msgspec.msgpack.decode(shared[0], type=list[ScalingChange])
    assert (change.cost_per_hour, change.saved_per_hour) == (8.4, -4.2)


def test_without_prices_a_change_does_not_speak_of_money(policy, log):
    policy(contexts(running=15.0))
    assert len(log) == 1 and "cost" not in log[0]


def test_a_decision_is_logged_once(policy, log):
    for _ in range(3):
        policy(contexts(running=15.0))
    assert len(log) == 1


def test_a_pool_that_keeps_its_size_under_load_is_told_once_a_minute_with_its_limits(policy, log):
    for _ in range(61):
        policy(contexts(running=5.0, blocks_used=45.0))
    assert len(log) == 2
    for line in log:
        assert line.startswith("autoscaling decode-m stays at 1 replicas: reason=min desired=1 ")
        assert " slots_of_limit=0.5556 " in line  # 5 of nine tenths of 10
        assert " kv_of_limit=0.5 " in line  # 45 of nine tenths of 100


def test_a_pool_without_work_is_not_told(policy, log):
    for _ in range(61):
        policy(contexts())
    assert log == []


def test_between_two_decisions_the_last_one_holds(monkeypatch):
    monkeypatch.setattr(policy_module.time, "monotonic", lambda: 100.0)
    policy = Policy()
    assert policy(contexts(running=15.0))[0][DECODE] == 2
    assert policy(contexts(running=1.0))[0][DECODE] == 2


def test_a_replica_that_has_not_reported_counts_as_idle(policy):
    given = contexts(running=5.0)
    given[DECODE].raw_metrics = {}
    assert policy(given)[0] == {DECODE: 1, INGRESS: 1}


def test_a_replica_of_the_last_version_may_lack_a_number_that_has_a_default(policy, monkeypatch):
    given = contexts(running=15.0)
    del given[DECODE].raw_metrics["decode_step_s"]
    monkeypatch.setitem(policy_module.DEFAULTS, "decode_step_s", IDLE.decode_step_s)
    assert policy(given)[0][DECODE] == policy(contexts(running=15.0))[0][DECODE] == 2


def test_reports_that_make_no_sense_leave_all_as_it_is(policy, log):
    given = contexts()
    del given[DECODE].raw_metrics["queued_tokens"]
    given[DECODE].target_num_replicas = 3
    assert policy(given)[0] == {DECODE: 3, INGRESS: 1}
    assert policy(given)[0] == {DECODE: 3, INGRESS: 1}
    assert len(log) == 1 and "cannot decide" in log[0], "once a minute is enough"


def test_changed_settings_take_effect(policy):
    assert policy(contexts(running=15.0))[0][DECODE] == 2
    given = contexts(running=15.0)
    roomier = {**asdict(LIMITS), "max_num_seqs": 100, "downscale_delay_s": 0.0}
    settings = PoolSettings("m", "decode", Slo(), Limits(**roomier))
    given[DECODE].config = AutoscalingConfig(**autoscaling_config(1, 4, 10, settings))
    given[DECODE].target_num_replicas = 2
    assert policy(given)[0][DECODE] == 1


# -- replicas that change roles ----------------------------------------------------------------------------

PD = DeploymentID("pd-m", "manta")


def switched(*replicas: dict[str, float], target: int | None = None) -> dict[DeploymentID, SimpleNamespace]:
    """Reports of replicas of one deployment, whose engines are pd-m-0, pd-m-1 and so on."""
    roles = RoleSettings(prefill=LIMITS, min_total=len(replicas), max_total=4, initial_prefill=1)
    idle = {**IDLE.numbers(), "blocks_total": 100.0, "token_s": 0.001}
    reports: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {name: {} for name in idle}
    for number, given in enumerate(replicas):
        for name, value in (idle | given).items():
            points = [TimeStampedValue(10.0, idle[name]), TimeStampedValue(14.0, value)]
            reports[name][ReplicaID(f"{number}", PD)] = points
    found = context(reports, PoolSettings("m", "decode", Slo(), LIMITS, roles), target or len(replicas))
    found.current_num_replicas = len(replicas)
    return {PD: found, INGRESS: context({}, None)}


@pytest.fixture
def tables(monkeypatch) -> list[tuple[str, dict[str, str]]]:
    """What the policy has shared of roles, oldest first, as (name, roles)."""
    shared: list[tuple[str, dict[str, str]]] = []

    def share(name: str, value: bytes) -> None:
        if name.startswith("roles/"):
            shared.append((name, msgspec.msgpack.decode(value)))

    monkeypatch.setattr(ray_compat, "share", share)
    return shared


def test_roles_are_shared_when_they_change_and_the_number_of_replicas_stays(policy, tables, log):
    for _ in range(3):
        assert policy(switched({}, {}, {}))[0] == {PD: 3, INGRESS: 1}
    (name, roles) = tables.pop()
    assert not tables and name == ray_compat.roles_of("manta", "pd-m")
    assert sorted(roles.values()) == ["decode", "decode", "prefill"] and roles.keys() == {f"pd-m-{n}" for n in range(3)}
    asking = {"queued_tokens": 3000.0}
    policy(switched(*(asking if role == "prefill" else {} for role in roles.values())))
    assert sorted(tables.pop()[1].values()) == ["decode", "prefill", "prefill"]
    assert any(line.startswith("autoscaling prefill-m from 1 to 2 replicas: reason=queue") for line in log)
    assert any(line.startswith("autoscaling decode-m from 2 to 1 replicas") for line in log)
    assert not any("cannot decide" in line for line in log)


def test_a_new_controller_goes_on_with_the_roles_that_replicas_report(policy, tables):
    policy(switched({}, {"prefill_role": 1.0}, {}))
    assert tables.pop()[1] == {"pd-m-0": "decode", "pd-m-1": "prefill", "pd-m-2": "decode"}


def test_a_table_that_could_not_be_written_is_written_by_the_next_decision(policy, tables, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("the GCS restarts")

    with monkeypatch.context() as patch:
        patch.setattr(ray_compat, "share", fail)
        assert policy(switched({}, {}, {}))[0] == {PD: 3, INGRESS: 1}
    policy(switched({}, {}, {}))
    assert sorted(tables.pop()[1].values()) == ["decode", "decode", "prefill"]


def test_a_role_that_a_replica_has_not_read_yet_is_not_given_to_another(policy, tables):
    policy(switched({}, {}, {}))
    policy(switched({}, {}, {}))
    assert len(tables) == 1


def test_more_replicas_are_requested_if_both_roles_together_lack_some(policy, tables):
    busy = {"running": 10.0, "waiting": 9.0, "queued_tokens": 3000.0}
    policy(switched({}, {}, {}))
    assert policy(switched(busy, busy, busy))[0][PD] == 4
