"""API keys and limits that change while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from deployments.app import http_app
from deployments.frontend.api_keys import ApiKeys, hash_key, key_line
from deployments.http.middleware import AuthConfig
from deployments.http.route import ADMIN as ADMINS
from deployments.observability.telemetry import Telemetry
from deployments.parts.keys import managed_keys
from deployments.parts.keys.managed_keys import ManagedKey, ManagedKeys
from deployments.quotas import key_quota
from deployments.quotas.limits import BudgetLimit, KeyLimits
from deployments.quotas.quotas import Quotas
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.key_value import sealed
from tests.deployments.fake_api import FakeApi, fake_api, says

LONG = "sk-long-enough-for-a-key"
ADMIN, USER = {"authorization": "Bearer sk-admin"}, {"authorization": "Bearer sk-user"}
JSON = {**ADMIN, "content-type": "application/json"}
BUDGETS = (BudgetLimit(budget_duration="1d", max_engine_seconds=5.0),)
AUTH = AuthConfig(
    api_keys=tuple(key_line(name, f"sk-{name}") for name in ("admin", "user")),
    admin_keys=("admin",),
    allow_runtime_key_updating=True,
    key_limits={"user": KeyLimits(rpm_limit=1000, budget_limits=BUDGETS)},
)


LONG = "sk-long-enough-for-a-key"


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_keys, "POLL_S", 0.01)
    monkeypatch.setattr(key_quota, "SYNC_TIMEOUT_S", 30.0)


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[FakeApi]:
    async with fake_api(says("hello"), auth=AUTH, store=StoreConfig(url=f"sqlite://{folder}/store")) as api:
        yield api


async def manage(api: FakeApi, what: str, headers: dict[str, str] = ADMIN, **body: Any) -> httpx.Response:
    return await api.client.post(f"/key/{what}", json=body, headers=headers)


async def complete(api: FakeApi, key: str) -> int:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    return (await api.client.post("/v1/completions", json=body, headers=headers)).status_code


async def until_status(api: FakeApi, key: str, status: int) -> None:
    async with asyncio.timeout(60):
        while await complete(api, key) != status:
            await asyncio.sleep(0.005)


async def test_a_key_that_one_ingress_makes_works_at_all_and_after_a_restart_until_it_is_deleted(tmp_path):
    async with serving(tmp_path) as one, serving(tmp_path) as two:
        made = await manage(one, "generate", key_alias="new", rpm_limit=1000)
        assert made.status_code == 200, made.text
        key = made.json()["key"]
        assert await complete(one, key) == 200
        await until_status(two, key, 200)
    assert key.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    async with serving(tmp_path) as three:
        await until_status(three, key, 200)
        listed = (await three.client.get("/key/list", headers=ADMIN)).json()["keys"]
        assert listed == ["new", "user"]
        assert (await manage(three, "delete", keys=[key])).json() == {"deleted_keys": ["new"]}
        assert await complete(three, key) == 401
        assert (await manage(three, "delete", keys=[key])).status_code == 400


async def test_limits_change_while_the_server_runs_and_what_was_spent_stays_spent(tmp_path):
    async with serving(tmp_path) as one, serving(tmp_path) as two:
        for _ in range(3):
            assert await complete(one, "sk-user") == 200
        changed = await manage(one, "update", key_alias="user", rpm_limit=3)
        assert changed.json()["limits"]["rpm_limit"] == 3
        assert changed.json()["limits"]["budget_limits"], "what is left out stays"
        assert await complete(one, "sk-user") == 429
        await until_status(two, "sk-user", 429)
        await manage(two, "update", key_alias="user", rpm_limit=None)
        await until_status(one, "sk-user", 200)
        await manage(two, "delete", key_aliases=["user"])
        await until_status(two, "sk-user", 200)
        own = (await two.client.get("/key/info", headers=USER)).json()
        assert own["limits"]["rpm_limit"] == 1000, "those of the configuration are in force again"


async def test_what_a_deleted_name_has_begun_keeps_its_limits_for_a_time(monkeypatch):
    values, api_keys = open_store(StoreConfig()), ApiKeys(None)
    quotas = Quotas(values, {})
    keys = ManagedKeys(values, api_keys, quotas, {})
    made = ManagedKey([hash_key("sk-new")], {"rpm_limit": 2})
    await keys.change(lambda table: table.keys.update(new=made))
    await keys.change(lambda table: None if keys.delete(table, "new") else pytest.fail("there is one"))
    assert (quotas.limits["new"].rpm_limit, api_keys.managed, keys.names) == (2, {}, set())
    assert not keys.delete(keys.table, "new")
    monkeypatch.setattr(managed_keys, "KEEP_DELETED_S", -1.0)
    await keys.change(lambda table: None)
    assert quotas.limits == {} == keys.table.keys


async def test_a_name_that_was_deleted_is_used_again_without_its_old_limits(tmp_path):
    async with serving(tmp_path) as api:
        for limits in ({"rpm_limit": 1000}, {}):
            key = (await manage(api, "generate", key_alias="new", **limits)).json()["key"]
            assert await complete(api, key) == 200
            info = (await api.client.get("/key/info", headers=ADMIN, params={"key_alias": "new"})).json()
            assert info["limits"] == limits
            assert (await manage(api, "delete", key_aliases=["new"])).json() == {"deleted_keys": ["new"]}
            assert (await api.client.get("/key/list", headers=ADMIN)).json()["keys"] == ["user"]
            assert (await manage(api, "delete", key_aliases=["new"])).status_code == 400


async def test_a_key_is_told_its_own_limits_and_what_was_used(tmp_path):
    async with serving(tmp_path) as api:
        await complete(api, "sk-user")
        own = (await api.client.get("/key/info", headers=USER)).json()
        assert own["key_alias"] == "user"
        assert own["used"]["rpm_limit/1m"]["limit"] == 1000 and own["used"]["rpm_limit/1m"]["used"] >= 1
        assert own["used"]["max_engine_seconds/1d"]["reset_at"].endswith("T00:00:00Z")
        of_other = await api.client.get("/key/info", headers=USER, params={"key_alias": "admin"})
        assert of_other.status_code == 403


async def test_only_admins_change_keys_and_only_where_that_is_allowed(tmp_path):
    async with serving(tmp_path) as api:
        for what, body in (("generate", {"key_alias": "a"}), ("update", {"key_alias": "a"}), ("delete", {})):
            assert (await manage(api, what, USER, **body)).status_code == 403
        assert (await api.client.get("/key/list", headers=USER)).status_code == 403
    async with fake_api(says("hello")) as api:
        assert (await manage(api, "generate", key_alias="a")).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "key_alias"),
        ({"key_alias": "a b"}, "key_alias"),
        ({"key_alias": "a", "key": "short"}, "key"),
        ({"key_alias": "a", "rpm_limit": -1}, "rpm_limit"),
        ({"key_alias": "a", "budget_limits": [{"budget_duration": "1d"}]}, "budget_limits"),
        ({"key_alias": "a", "max_budgets": 1}, "max_budgets"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(tmp_path, body, param):
    async with serving(tmp_path) as api:
        refused = await manage(api, "generate", **body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


async def test_a_key_is_never_made_twice(tmp_path):
    async with serving(tmp_path) as api:
        for status in (200, 400):
            made = await manage(api, "generate", key_alias="a", key="sk-chosen-by-myself")
            assert made.status_code == status
            assert hash_key("sk-chosen-by-myself") not in made.text


async def test_keys_survive_a_store_that_loses_its_values(tmp_path):
    async with serving(tmp_path) as one:
        key = (await manage(one, "generate", key_alias="new")).json()["key"]
        values = open_store(StoreConfig(url=f"sqlite://{tmp_path}/store"))
        await values.delete(managed_keys.STORED)
        async with asyncio.timeout(60):
            while await values.get(managed_keys.STORED) is None:
                await asyncio.sleep(0.005)
        await values.close()
        assert await complete(one, key) == 200
    async with serving(tmp_path) as two:
        await until_status(two, key, 200)


BIG = "9" * 400
BAD_NUMBERS = ["Infinity", "-Infinity", "NaN", "1e999", "1e16", "-1", BIG, "9007199254740993", '"1"', "true", "[]"]
BAD_LIMITS = [
    *((field, number) for field in ("rpm_limit", "tpm_limit", "max_parallel_requests") for number in BAD_NUMBERS),
    *(("priority", number) for number in ("Infinity", "2147483648", BIG)),
    *(
        ("budget_limits", f'[{{"budget_duration": "1d", "{cost}": {number}}}]')
        for cost in ("max_budget", "max_engine_seconds")
        for number in BAD_NUMBERS
    ),
    *(
        ("budget_limits", f'[{{"budget_duration": "{duration}", "max_budget": 1}}]')
        for duration in ("99999mo", "1201mo", "99999d", "0d", "1y", "1d\\n", "٣d", "")
    ),
    ("models", "[" + ",".join(['"m"'] * 1001) + "]"),
    ("models", f'["{"m" * 257}"]'),
]


async def test_a_limit_that_is_no_bounded_number_is_refused_by_name_and_nothing_is_stored(tmp_path):
    async with serving(tmp_path) as api:
        before = (await api.client.get("/key/info", headers=USER)).json()
        for field, value in BAD_LIMITS:
            for what in ("generate", "update"):
                body = f'{{"key_alias": "user", "{field}": {value}}}'
                answer = await api.client.post(f"/key/{what}", content=body, headers=JSON)
                assert answer.status_code == 400, (field, value, answer.text)
                error = answer.json()["error"]
                assert "not valid JSON" in error["message"] or error["param"] == field
                assert error["message"].isprintable() and len(error["message"]) < 1000
        assert (await api.client.get("/key/list", headers=ADMIN)).json()["keys"] == ["user"]
        assert (await api.client.get("/key/info", headers=USER)).json() == before


BAD_NAMES = [
    "", " ", "a b", "a\n", "\u0000", "a\u0000b", "\u001b[31m", "\u007f", "../a", "..", "/etc/passwd", "a/b", "a:b",
    "\u0430dmin", "adm\u200bin", "\u202eadmin", "\uff41dmin", "\u00a0", "-a", "a" * 257,
]  # fmt: skip
BAD_KEYS = [
    "", " " * 20, "k" * 15, "k" * 1025, "a key with blanks in it", "0123456789abcde\n", "0123456789abcdef\u0000",
    "schl\u00fcssel-0123456789", "sk-user",
]  # fmt: skip


async def test_names_and_keys_that_look_like_others_or_fit_in_no_header_are_refused_by_name(tmp_path):
    auth = replace(AUTH, api_keys=(*AUTH.api_keys, key_line("long", LONG)))
    store = StoreConfig(url=f"sqlite://{tmp_path}/store")
    async with fake_api(says("hello"), auth=auth, store=store) as api:
        await refuse(api)


async def refuse(api: FakeApi) -> None:
    for field, values in (("key_alias", BAD_NAMES), ("key", BAD_KEYS)):
        for value in values:
            answer = await manage(api, "generate", **{"key_alias": "new", field: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), (value, answer.text)
            assert error["message"].isprintable()
    for body in (b'{"key_alias": "\\ud800"}', b'{"key_alias": "new", "key": "0123456789abcdef\\ud800"}'):
        assert (await api.client.post("/key/generate", content=body, headers=JSON)).status_code == 400
    for name in ("nobody", "../a", "adm\u200bin"):
        assert (await manage(api, "update", key_alias=name, rpm_limit=1)).status_code == 400
    taken = await manage(api, "generate", key_alias="new", key=LONG)
    assert taken.json()["error"]["message"] == "key must be a new key, got one that exists"
    assert (await api.client.get("/key/list", headers=ADMIN)).json()["keys"] == ["user"]


def test_every_number_and_text_of_these_bodies_has_bounds():
    def check(schema: dict[str, Any], path: str) -> None:
        if schema.get("type") in ("integer", "number"):
            assert {"minimum", "maximum"} <= schema.keys(), path
        if schema.get("type") == "string":
            assert {"maxLength", "pattern", "enum", "const"} & schema.keys(), path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
        for key, inner in schema.items():
            for each in inner if isinstance(inner, list) else [inner]:
                if isinstance(each, dict):
                    check(each, f"{path}.{key}")

    app = http_app({}, Telemetry("i"), replace(AUTH, allow_runtime_lora_updating=True))
    bodies = {route.body for route in app.state.routes if route.audience is ADMINS and route.body}
    assert len(bodies) == 5
    for body in bodies:
        schema = body.model_json_schema()
        schema["properties"].pop("model", None)
        check(schema, body.__name__)


UNREADABLE: dict[str, Any] = {
    "a limit that was infinite": {"limits": {"budget_limits": [{"budget_duration": "1d", "max_engine_seconds": None}]}},
    "a duration that no date has": {"limits": {"budget_limits": [{"budget_duration": "99999mo", "max_budget": 1}]}},
    "a field of a later version": {"limits": {"rpm_limit_of_tomorrow": 1}},
    "another type": {"limits": 3},
    "no record": [1],
}


@pytest.mark.parametrize("record", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_record_that_cannot_be_read_spoils_only_itself(tmp_path, record, caplog):
    if isinstance(record, dict):
        record = {"digests": [hash_key("sk-spoilt")], **record}
    async with serving(tmp_path) as one:
        key = (await manage(one, "generate", key_alias="good")).json()["key"]
        values = open_store(StoreConfig(url=f"sqlite://{tmp_path}/store"))
        stored = await values.get(managed_keys.STORED)
        table = msgspec.json.decode(stored[4:])
        table["keys"]["spoilt"], table["version"] = record, table["version"] + 1
        assert await values.replace(managed_keys.STORED, stored, sealed(msgspec.json.encode(table)), 1e6)
        await values.close()
        async with serving(tmp_path) as two:
            await until_status(two, key, 200)
            assert await complete(two, "sk-spoilt") == 401
            assert (await two.client.get("/key/list", headers=ADMIN)).json()["keys"] == ["good", "spoilt", "user"]
            for what in ("generate", "update"):
                assert (await manage(two, what, key_alias="spoilt", rpm_limit=1)).status_code == 400
            assert (await manage(two, "delete", keys=[key])).status_code == 200, "a leaked key can still be deleted"
            await until_status(one, key, 401)
            assert (await manage(two, "delete", key_aliases=["spoilt"])).json() == {"deleted_keys": ["spoilt"]}
            assert (await manage(two, "generate", key_alias="spoilt")).status_code == 200
    said = [message for message in caplog.messages if "'spoilt'" in message]
    assert 1 <= len(said) <= 2, "each ingress says it once"
