"""What a failed Serve call means to whoever made it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError, RequestCancelledError
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ServeStatus

from deployments.replicas.serve_pool import ServeRemotePool, _answer
from deployments.routing.routing_context import RoutingContext
from engine.errors import EngineUnavailable, InvalidParameter, Overloaded, ServingError
from engine.wire.parts.images import MultiModalFeatureSpec, PlaceholderRange, PromptImages
from engine.wire.remote_request import Peer, RemoteRequest
from engine.wire.sampling_params import SamplingParams


class Response:
    """A Serve call that ends so."""

    def __init__(self, error: Exception):
        self.error = error

    def __await__(self):
        raise self.error
        yield  # a generator, so that it can be awaited


def outcome(error: Exception, call: RoutingContext | None = None) -> ServingError:
    with pytest.raises(ServingError) as raised:
        asyncio.run(_answer(Response(error), call or RoutingContext()))
    return raised.value


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), "lost"),
        (BackPressureError(1, 1), "ended"),
    ],
    ids=["lost", "refused"],
)
def test_the_router_is_told_how_a_call_ended(error, told):
    call, heard = RoutingContext(), []
    call.placed(heard.append)
    outcome(error, call)
    assert heard == [told]


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ReplicaUnavailableError("gone"),
        RequestCancelledError("request"),
        RuntimeError("Unexpected error (StatusCode.INTERNAL)"),
        grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata()),
        RayTaskError("generate", "a traceback", ValueError("a bug in the replica")).as_instanceof_cause(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_lost_call_may_be_tried_elsewhere(error):
    assert isinstance(outcome(error), EngineUnavailable)
    assert outcome(error).retryable


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("NoExtensionBias"),
        ReplicaUnavailableError("the replica died: ZMQError"),
        TaskCancelledError(),
        BackPressureError(1, 1),
        RayTaskError("generate", "a traceback", KeyError("private")).as_instanceof_cause(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_message_says_what_the_client_can_do_and_nothing_of_the_server(error):
    message = str(outcome(error))
    assert "send the request again" in message
    for internal in ("NoExtensionBias", "ZMQError", "traceback", "private", "Error"):
        assert internal not in message


def test_error_that_the_replica_raised_on_purpose_keeps_its_type():
    cause = InvalidParameter("prompt", [], "at least one token")
    # what Serve raises is of both types at once, and its text is a traceback: that must not go on
    assert outcome(RayTaskError("generate", "a traceback", cause).as_instanceof_cause()) is cause


def test_full_queues_are_an_overload():
    assert isinstance(outcome(BackPressureError(1, 1)), Overloaded)


class PrefillHandle:
    """Keeps the keys by which calls are routed."""

    def __init__(self):
        self.prefill, self.keys = self, []

    def remote(self, _request: object, call: RoutingContext) -> asyncio.Future:
        self.keys.append(call.prompt.keys)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Handle:
    deployment_id = DeploymentID("prefill-m", "manta")


@pytest.mark.parametrize(
    ("status", "running", "state"),
    [
        ("UPDATING", 2, "deploying"),
        ("DEPLOY_FAILED", 2, "deploying"),  # a replica has died during an update, which goes on
        ("DEPLOY_FAILED", 0, "down"),
        ("UNHEALTHY", 1, "up"),
        ("HEALTHY", 2, "up"),
    ],
)
def test_a_pool_is_deploying_until_its_update_is_complete(monkeypatch, status, running, state):
    deployment = DeploymentStatusOverview(status, "UNSPECIFIED", {"RUNNING": running}, "")
    application = ApplicationStatusOverview("DEPLOYING", "", 0.0, {"prefill-m": deployment})
    monkeypatch.setattr(serve, "status", lambda: ServeStatus(applications={"manta": application}))
    assert asyncio.run(ServeRemotePool(Handle()).state()) == state


def test_a_prefill_request_is_routed_by_the_images_of_its_prompt():
    def request(name: str, *hashes: bytes) -> RemoteRequest:
        place = PlaceholderRange(4, 4)
        images = [MultiModalFeatureSpec(data={}, mm_hash=h, mm_position=place, num_embeds=4) for h in hashes]
        return RemoteRequest(
            handoff_id=name, request_id=name, attempt=1, token_ids=[1] * 8, num_prompt=8, params=SamplingParams(),
            seed=1, cache_salt="", skip=0, fingerprint="", decode=Peer("decode", "", 1),
        ).asking(PromptImages.of(images))  # fmt: skip

    async def scenario() -> None:
        for remote_request in (request("text"), request("one", b"one"), request("two", b"two")):
            await pool.prefill(remote_request, [])

    handle = PrefillHandle()
    pool = ServeRemotePool(handle, block_size=4)
    asyncio.run(scenario())
    assert len({keys[0] for keys in handle.keys}) == 1, "the image begins behind the first block"
    assert len({keys[1] for keys in handle.keys}) == 3
