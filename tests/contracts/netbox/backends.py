"""The NetBox servers that the suite runs against: the fake one, and a real one if the environment names it.

`ROLLOUTD_TEST_NETBOX_URL` and `ROLLOUTD_TEST_NETBOX_TOKEN_FILE` name a real NetBox.  Nothing is written
to it, and nothing is expected of its objects except that there are some.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rolloutd.adapters.netbox.http import TimeLimits
from rolloutd.adapters.netbox.inventory import NetboxInventory
from rolloutd.adapters.netbox.registration import NetboxInventoryParams
from rolloutd.errors import SourceFailed
from tests.support.fake_netbox import FakeNetbox, Fleet
from tests.support.fake_netbox.server import V2

URL, TOKEN_FILE = "ROLLOUTD_TEST_NETBOX_URL", "ROLLOUTD_TEST_NETBOX_TOKEN_FILE"

SHORT = TimeLimits(connect_s=0.5, read_s=0.5, refresh_s=30.0)
"""Limits for a server that hangs on purpose."""

LISTS = {"devices": "/api/dcim/devices/", "virtual_machines": "/api/virtualization/virtual-machines/"}


@dataclass
class Server:
    """A NetBox: its address, a token that may read, and the fake behind it if it is one."""

    url: str
    token_file: Path
    directory: Path
    fake: FakeNetbox | None = None

    def inventory(self, *, limits: TimeLimits | None = None, **params: Any) -> NetboxInventory:
        """Return a source with these settings; all objects if none is given."""
        given = {"url": self.url, "token_file": str(self.token_file), "filter": {}, **params}
        content = NetboxInventoryParams.model_validate(given).model_dump(mode="json", exclude_none=True)
        return NetboxInventory(content, limits=limits)

    def other_token(self, text: str) -> Path:
        path = self.directory / "other.token"
        path.write_text(text)
        return path

    async def get(self, path: str, **params: Any) -> Any:
        """Return what the server itself answers, whatever the status."""
        async with self._session() as session, session.get(self.url + path, params=params) as response:
            return await response.json()

    def _session(self) -> aiohttp.ClientSession:
        word = self.token_file.read_text().strip()
        keyword = "Bearer" if word.startswith("nbt_") else "Token"
        return aiohttp.ClientSession(headers={"Authorization": f"{keyword} {word}"})

    async def all(self, kind: str, fields: str) -> list[dict[str, Any]]:
        """Return all objects of a kind, by a client of the test's own."""
        found: list[dict[str, Any]] = []
        while True:
            params = {"limit": 500, "offset": len(found), "ordering": "id", "fields": fields}
            page = await self.get(LISTS[kind], **params)
            found += page["results"]
            if len(found) >= page["count"] or not page["results"]:
                return found

    async def names(self) -> set[str]:
        """Return the names that one object alone has."""
        names = Counter([each["name"] for kind in LISTS for each in await self.all(kind, "id,name")])
        return {name for name, count in names.items() if name and count == 1}


@asynccontextmanager
async def open_fake(directory: Path, fleet: Fleet | None = None) -> AsyncIterator[Server]:
    """Open a fake NetBox."""
    token_file = directory / "netbox.token"
    token_file.write_text(f"{V2}\n")
    async with FakeNetbox(fleet or Fleet.of(60, 15)) as fake:
        yield Server(fake.url, token_file, directory, fake)


@asynccontextmanager
async def open_real(directory: Path) -> AsyncIterator[Server]:
    """Open the NetBox that the environment names."""
    yield Server(os.environ[URL].rstrip("/"), Path(os.environ[TOKEN_FILE]), directory)


SERVERS: list[Callable[[Path], AbstractAsyncContextManager[Server]]] = [
    open_fake,
    *([open_real] if URL in os.environ and TOKEN_FILE in os.environ else []),
]


def fake_of(server: Server) -> FakeNetbox:
    assert server.fake is not None
    return server.fake


async def failure(server: Server, **params: Any) -> str:
    """Return why a refresh fails."""
    with pytest.raises(SourceFailed) as failed:
        await server.inventory(**{"limits": SHORT, **params}).refresh()
    text = str(failed.value)
    assert V2 not in text
    assert V2.partition(".")[2] not in text
    assert text.startswith("netbox/netbox: ")
    assert ";" in text
    assert len(text.split()) <= 25
    return text.removeprefix("netbox/netbox: ")


Answer = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def answer_once(path: str, response: Callable[[], web.Response], times: int = 1) -> Answer:
    """Return an interception of the first requests for a path."""
    left = times

    async def intercept(request: web.Request) -> web.StreamResponse | None:
        nonlocal left
        if request.path != path or left == 0:
            return None
        left -= 1
        return response()

    return intercept


def answer_always(path: str, response: Callable[[], web.Response]) -> Answer:
    return answer_once(path, response, times=10**6)
