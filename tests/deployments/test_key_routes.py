"""API keys and limits that change while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.frontend import managed_keys
from deployments.frontend.api_keys import ApiKeys, hash_key, key_line
from deployments.frontend.managed_keys import ManagedKey, ManagedKeys
from deployments.http.middleware import AuthConfig
from deployments.quotas import key_quota
from deployments.quotas.limits import BudgetLimit, KeyLimits
from deployments.quotas.quotas import Quotas
from deployments.storage.config import StoreConfig, open_store
from tests.deployments.fake_api import FakeApi, fake_api, says

ADMIN, USER = {"authorization": "Bearer sk-admin"}, {"authorization": "Bearer sk-user"}
BUDGETS = (BudgetLimit(budget_duration="1d", max_engine_seconds=5.0),)
AUTH = AuthConfig(
    api_keys=tuple(key_line(name, f"sk-{name}") for name in ("admin", "user")),
    admin_keys=("admin",),
    allow_runtime_key_updating=True,
    key_limits={"user": KeyLimits(rpm_limit=1000, budget_limits=BUDGETS)},
)


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
