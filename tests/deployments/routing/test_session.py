"""Which session a request belongs to, by what it sends."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import Headers

from deployments.routing.session import session_of
from engine.errors import InvalidParameter
from tests.deployments.fake_api import fake_api

SESSION = "760859fa-3afe-498a-98af-84124cf8c389"
OLD_USER = f"user_5dd07c33da27e6d2968d94ea20bf47a7_account__session_{SESSION}"
USER = json.dumps({"device_id": "836b57", "account_uuid": "", "session_id": SESSION})


@pytest.mark.parametrize(
    ("headers", "session_id", "user", "session"),
    [
        ({}, None, None, ""),
        ({"X-Session-Id": "a", "session-id": "b"}, "c", USER, "a"),
        ({"session-id": "b"}, "c", USER, "c"),
        ({"X-Claude-Code-Session-Id": SESSION}, None, None, SESSION),
        ({"session-id": "b", "thread-id": "t"}, "", "alice", "b"),
        ({"session_id": "b"}, None, USER, "b"),
        ({}, None, USER, SESSION),
        ({}, None, OLD_USER, SESSION),
    ],
)
def test_the_first_name_of_a_session_counts(headers, session_id, user, session):
    assert session_of(Headers(headers), session_id, user) == session


@pytest.mark.parametrize("user", ["alice", "alice_session_1", "{", '{"session_id": 7}', "[]", '{"session_id": "\\n"}'])
def test_other_users_name_no_session(user):
    assert session_of(Headers({}), None, user) == ""


def test_a_bad_id_is_refused_if_it_was_given_for_this_and_else_ignored():
    for headers, given, field in (({"x-session-id": "a" * 257}, None, "x-session-id"), ({}, "\u00e4", "session_id")):
        with pytest.raises(InvalidParameter, match=f"{field} must be at most 256 printable ASCII characters"):
            session_of(Headers(headers), given, None)
    assert session_of(Headers({"session-id": "a" * 257}), None, None) == ""


async def test_turns_of_claude_code_are_of_one_session():
    body = {
        "model": "fake",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "a"}],
        "metadata": {"user_id": USER},
    }
    async with fake_api() as api:
        assert (await api.client.post("/v1/messages", json=body)).status_code == 200
        assert api.engine.added[-1].session_id == SESSION
