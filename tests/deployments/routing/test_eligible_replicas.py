"""Which replicas come into question for a call at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID

from deployments.routing.router import eligible_replicas
from deployments.routing.routing_context import RoutingContext
from engine.wire.generate_request import ModelIdentity

POOL = DeploymentID("decode-m", "manta")
WEIGHTS = {"a": "old", "b": "old", "c": "new"}


def eligible(weights: str | None, *avoid: str) -> set[str]:
    """weights: of the model that the call is for."""
    candidates: list[Any] = [
        SimpleNamespace(replica_id=ReplicaID(name, POOL), replica_metadata={"weights": of, "vocabulary": "v"})
        for name, of in WEIGHTS.items()
    ]
    model = None if weights is None else ModelIdentity(weights, "v")
    call = RoutingContext(avoid=[f"decode-m-{name}" for name in avoid], model=model)
    return {replica.replica_id.unique_id for replica in eligible_replicas(candidates, call)}


def test_call_goes_to_replicas_of_its_model():
    assert eligible("old") == {"a", "b"}
    assert eligible("new") == {"c"}
    assert eligible(None) == {"a", "b", "c"}


def test_call_goes_anywhere_where_its_model_is_gone():
    assert eligible("older still") == {"a", "b", "c"}


def test_replicas_to_avoid_are_taken_only_where_no_other_has_the_model():
    assert eligible("old", "a") == {"b"}
    assert eligible("new", "c") == {"c"}
    assert eligible(None, "a", "b", "c") == {"a", "b", "c"}


def test_a_text_goes_on_with_the_numerics_with_which_it_began_as_long_as_a_replica_has_them():
    candidates: list[Any] = [
        SimpleNamespace(replica_id=ReplicaID(name, POOL), replica_metadata=metadata)
        for name, metadata in {"a": {"numerics": "1"}, "b": {"numerics": "1"}, "c": {"numerics": "2"}, "d": {}}.items()
    ]

    def chosen(numerics: str, *avoid: str) -> set[str]:
        call = RoutingContext(avoid=[f"decode-m-{name}" for name in avoid], numerics=numerics)
        return {replica.replica_id.unique_id for replica in eligible_replicas(candidates, call)}

    assert chosen("1") == {"a", "b"}
    assert chosen("1", "a") == {"b"}
    assert chosen("1", "a", "b") == {"c", "d"}, "those that are about to stop would refuse it"
    assert chosen("") == chosen("3") == {"a", "b", "c", "d"}


def answering(role: str, roles: dict[str, str], *avoid: str) -> set[str]:
    """roles: as engines have reported them."""
    candidates: list[Any] = [SimpleNamespace(replica_id=ReplicaID(n, POOL), replica_metadata={}) for n in "abc"]
    call = RoutingContext(avoid=[f"decode-m-{name}" for name in avoid], role=role)  # type: ignore[arg-type]
    told: Any = {f"decode-m-{name}": of for name, of in roles.items()}
    return {replica.replica_id.unique_id for replica in eligible_replicas(candidates, call, told)}


def test_calls_go_to_replicas_of_their_role_and_a_replica_that_has_not_reported_may_have_it():
    roles = {"a": "prefill", "b": "decode"}
    assert answering("prefill", roles) == {"a", "c"}
    assert answering("decode", roles) == {"b", "c"}
    assert answering("decode", {}) == {"a", "b", "c"}


def test_another_replica_takes_a_call_where_none_has_its_role():
    everybody = dict.fromkeys("abc", "decode")
    assert answering("prefill", everybody, "a") == {"b", "c"}
    assert answering("prefill", {**everybody, "a": "prefill"}, "a") == {"a"}, "a link that failed may work again"
