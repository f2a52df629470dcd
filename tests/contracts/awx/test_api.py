"""What the runner relies on in AWX's API: the fake one has it, and a real one if the environment names it.

`ROLLOUTD_TEST_AWX_URL` with the prefix of the API, `ROLLOUTD_TEST_AWX_TOKEN_FILE` and
`ROLLOUTD_TEST_AWX_ORGANIZATION` name a real AWX and an organization of its own for tests.  Inventories are
created and deleted there; nothing is launched.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.fake_awx import FakeAwx
from tests.support.fake_awx.server import TOKEN

URL, TOKEN_FILE, ORGANIZATION = (
    f"ROLLOUTD_TEST_AWX_{name}" for name in ("URL", "TOKEN_FILE", "ORGANIZATION")
)

JSON = Any


@dataclass
class Api:
    """An AWX as its clients see it."""

    url: str
    session: aiohttp.ClientSession
    organization_name: str

    async def call(
        self, method: str, path: str, body: JSON = None, query: Mapping[str, str] | None = None
    ) -> tuple[int, JSON]:
        async with self.session.request(method, f"{self.url}/{path}", json=body, params=query) as answer:
            return answer.status, (await answer.json() if answer.content_type == "application/json" else None)

    async def organization(self) -> int:
        answer = (await self.call("GET", "organizations/", query={"name": self.organization_name}))[1]
        return int(answer["results"][0]["id"])


@pytest.fixture(params=["fake", *(["real"] if URL in os.environ else [])])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    if request.param == "real":
        token = Path(os.environ[TOKEN_FILE]).read_text().strip()
        async with _session(token) as session:
            yield Api(os.environ[URL].rstrip("/"), session, os.environ[ORGANIZATION])
        return
    async with FakeAwx() as fake, _session(TOKEN) as session:
        yield Api(fake.url + fake.prefix, session, "rolloutd")


def _session(token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})


async def test_name_of_inventory_is_claimed_once(api: Api) -> None:
    body: dict[str, JSON] = {
        "name": f"rolloutd test {secrets.token_hex(8)}",
        "organization": await api.organization(),
    }
    status, inventory = await api.call("POST", "inventories/", body)
    assert status == 201
    try:
        status, refusal = await api.call("POST", "inventories/", body)
        assert status == 400
        assert "already exists" in str(refusal)
        listed = (await api.call("GET", "inventories/", query={"name": body["name"]}))[1]["results"]
        assert [each["id"] for each in listed] == [inventory["id"]]
    finally:
        status, _ = await api.call("DELETE", f"inventories/{inventory['id']}/")
    assert status in (202, 204)


async def test_host_of_inventory_can_be_turned_off(api: Api) -> None:
    body: dict[str, JSON] = {
        "name": f"rolloutd test {secrets.token_hex(8)}",
        "organization": await api.organization(),
    }
    _, inventory = await api.call("POST", "inventories/", body)
    path = f"inventories/{inventory['id']}/"
    try:
        status, host = await api.call("POST", f"{path}hosts/", {"name": "n0", "variables": '{"a": 1}'})
        assert (status, host["enabled"]) == (201, True)
        status, refusal = await api.call("POST", f"{path}hosts/", {"name": "n0"})
        assert status == 400
        assert "already exists" in str(refusal)
        status, _ = await api.call("PATCH", f"hosts/{host['id']}/", {"enabled": False})
        assert status == 200
        listed = (await api.call("GET", f"{path}hosts/"))[1]["results"]
        assert [each["enabled"] for each in listed] == [False]
        status, group = await api.call("POST", f"{path}groups/", {"name": "web"})
        assert status == 201
        status, _ = await api.call("POST", f"groups/{group['id']}/hosts/", {"id": host["id"]})
        assert status in (201, 204)
        assert (await api.call("GET", "jobs/", query={"inventory": str(inventory["id"])}))[1]["results"] == []
    finally:
        await api.call("DELETE", path)


async def test_variables_are_no_filter_of_jobs(api: Api) -> None:
    status, _ = await api.call("GET", "jobs/", query={"extra_vars__icontains": "run"})
    assert status == 403


async def test_relations_of_inventory_filter_jobs(api: Api) -> None:
    query = {
        "inventory__organization": str(await api.organization()),
        "inventory__description": "no-such-node",
        "inventory__name__startswith": "rolloutd ",
        "status__in": "new,pending,waiting,running",
    }
    status, answer = await api.call("GET", "jobs/", query=query)
    assert (status, answer["results"]) == (200, [])


async def test_wrong_token_is_401(api: Api) -> None:
    async with _session("no-such-token") as session:
        other = Api(api.url, session, api.organization_name)
        assert (await other.call("GET", "organizations/"))[0] == 401
