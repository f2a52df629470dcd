"""The receiver of webhooks: what causes a refresh, of which objects, and what is refused."""

from __future__ import annotations

import asyncio
import grp
import hashlib
import hmac
import io
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rolloutd.adapters.netbox import inventory, webhook
from rolloutd.adapters.netbox.inventory import MAX_HINTS
from rolloutd.adapters.netbox.webhook import WebhookReceiver
from rolloutd.contracts import SystemClock
from rolloutd.errors import SourceFailed
from rolloutd.ports import DiscoveredNode
from rolloutd.service.listen_socket import CannotListen
from tests.contracts.netbox.backends import Server, open_fake
from tests.support.fake_netbox import FakeNetbox, Fleet
from tests.support.ports import free_port

SECRET = b"twin-twin-twin-twin"
DEVICES = "/api/dcim/devices/"


@dataclass
class Receiving:
    """A source with a receiver, and the refreshes that it asked for."""

    server: Server
    receiver: WebhookReceiver
    inventory: Any
    refreshes: asyncio.Queue[None]

    async def send(self, body: bytes, signature: str | None = None) -> int:
        """Send a message, signed unless a signature is given, and return the status of the answer."""
        signed = hmac.new(SECRET, body, hashlib.sha512).hexdigest() if signature is None else signature
        headers = {"X-Hook-Signature": signed, "Content-Type": "application/json"}
        address = self.receiver.address
        connector = aiohttp.UnixConnector(address) if address.startswith("/") else None
        host = "receiver" if connector else address
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"http://{host}/netbox", data=io.BytesIO(body), headers=headers) as response,
        ):
            return response.status

    async def refresh(self) -> dict[str, DiscoveredNode]:
        """Wait for the refresh that a message causes, and do it."""
        async with asyncio.timeout(30):
            await self.refreshes.get()
        return {node.name: node for node in await self.inventory.refresh()}


@asynccontextmanager
async def receive(
    directory: Path, fleet: Fleet, source: Mapping[str, Any] | None = None, **address: str
) -> AsyncIterator[Receiving]:
    secret_file = directory / "webhook.secret"
    secret_file.write_bytes(SECRET + b"\n")
    async with open_fake(directory, fleet) as server:
        inventory, refreshes = server.inventory(**source or {}), asyncio.Queue[None]()
        params = {"secret_file": str(secret_file), **address}
        receiver = WebhookReceiver(inventory, params, SystemClock())
        task = asyncio.create_task(receiver.run(lambda _: None, lambda: refreshes.put_nowait(None)))
        try:
            async with asyncio.timeout(30):
                while not receiver.address and not task.done():
                    await asyncio.sleep(0.001)
            yield Receiving(server, receiver, inventory, refreshes)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def receiving(tmp_path: Path) -> AsyncIterator[Receiving]:
    async with receive(tmp_path, Fleet.of(30, 12), listen=f"127.0.0.1:{free_port()}") as opened:
        yield opened


def message(number: int = 1, *, at: datetime | None = None, **changed: Any) -> bytes:
    content = {
        "event": "updated",
        "timestamp": (at or datetime.now(UTC)).isoformat(),
        "object_type": "dcim.device",
        "username": "someone",
        "request_id": "6c8e4b0e-0000-4000-8000-000000000000",
        "data": {"id": number, "name": "claimed-by-the-message"},
        "snapshots": {},
    }
    return json.dumps({**content, **changed}).encode()


def reads_lists(fake: FakeNetbox) -> bool:
    """Return whether the devices were read without an id."""
    return any(request.path == DEVICES and "id" not in request.query for request in fake.requests)


async def test_message_reads_that_object_again(receiving: Receiving) -> None:
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.fleet.devices[2]["status"] = {"value": "offline", "label": "Offline"}
    fake.fleet.devices[3]["status"] = {"value": "offline", "label": "Offline"}
    fake.requests.clear()
    assert await receiving.send(message(fake.fleet.devices[2]["id"])) == 202
    nodes = await receiving.refresh()
    assert nodes[fake.fleet.devices[2]["name"]].labels["status"] == "offline"
    assert nodes[fake.fleet.devices[3]["name"]].labels["status"] == "active"
    assert len(nodes) == 42
    lists = [request for request in fake.requests if request.path == DEVICES]
    assert [request.query["id"] for request in lists] == [str(fake.fleet.devices[2]["id"])]


async def test_constant_messages_do_not_put_off_whole_refresh(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "MAX_PARTIAL_READS", 2)
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.fleet.devices[3]["status"] = {"value": "offline", "label": "Offline"}
    found = []
    for number in range(3):
        await receiving.send(message(request_id=str(number)))
        found.append((await receiving.refresh())[fake.fleet.devices[3]["name"]].labels["status"])
    assert found == ["active", "active", "offline"]


async def test_missing_object_causes_whole_refresh(receiving: Receiving) -> None:
    """A deleted object and a token that lost a right give the same answer, so the lists decide."""
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    gone = fake.fleet.devices.pop(4)
    await receiving.send(message(gone["id"], event="deleted"))
    nodes = await receiving.refresh()
    assert gone["name"] not in nodes
    assert len(nodes) == 41
    assert reads_lists(fake)


async def test_change_outside_the_filter_reads_no_list(receiving: Receiving) -> None:
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.requests.clear()
    for number in range(900_000, 900_020):
        await receiving.send(message(number))
    assert len(await receiving.refresh()) == 42
    assert not reads_lists(fake)


async def test_message_about_another_device_keeps_filter_by_id(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    fleet = Fleet.of(30, 12)
    wanted, other = fleet.devices[0], fleet.devices[1]
    params = {"objects": ["devices"], "filter": {"id": [wanted["id"]]}}
    async with receive(tmp_path, fleet, params, listen=address) as receiving:
        assert [node.name for node in await receiving.inventory.refresh()] == [wanted["name"]]
        await receiving.send(message(other["id"]))
        assert list(await receiving.refresh()) == [wanted["name"]]
        await receiving.send(message(wanted["id"]))
        assert list(await receiving.refresh()) == [wanted["name"]]


@pytest.mark.parametrize("object_type", ["dcim.site", "tenancy.tenant", "extras.configcontext"])
async def test_other_object_causes_whole_refresh(receiving: Receiving, object_type: str) -> None:
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.requests.clear()
    assert await receiving.send(message(object_type=object_type)) == 202
    await receiving.refresh()
    assert reads_lists(fake)


async def test_change_of_many_objects_reads_lists_once(receiving: Receiving) -> None:
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.requests.clear()
    for number in range(MAX_HINTS + 1):
        await receiving.send(message(number))
    await receiving.refresh()
    assert reads_lists(fake)
    assert receiving.refreshes.qsize() <= MAX_HINTS // 10


async def test_failed_read_of_object_is_followed_by_whole_refresh(receiving: Receiving) -> None:
    fake = receiving.server.fake
    assert fake is not None
    await receiving.inventory.refresh()
    fake.tokens[receiving.server.token_file.read_text().strip()].refusal = "Token disabled"
    await receiving.send(message(fake.fleet.devices[0]["id"]))
    with pytest.raises(SourceFailed, match="Token disabled"):
        await receiving.refresh()
    fake.tokens[receiving.server.token_file.read_text().strip()].refusal = ""
    fake.requests.clear()
    assert len(await receiving.inventory.refresh()) == 42
    assert reads_lists(fake)


async def test_replayed_message_is_refused(receiving: Receiving) -> None:
    body = message()
    assert await receiving.send(body) == 202
    assert await receiving.send(body) == 409
    assert await receiving.send(message(2)) == 202, "one request of NetBox changes several objects"


@pytest.mark.parametrize("age_s", [301, -301, 86_400])
async def test_old_message_is_refused(receiving: Receiving, age_s: int) -> None:
    at = datetime.fromtimestamp(datetime.now(UTC).timestamp() - age_s, UTC)
    assert await receiving.send(message(at=at)) == 403
    assert receiving.refreshes.empty()


@pytest.mark.parametrize("signature", ["", "0" * 128, "sha512=" + "0" * 128, "\u00e9"])
async def test_invalid_signature_is_refused(receiving: Receiving, signature: str) -> None:
    assert await receiving.send(message(), signature) == 403
    assert receiving.refreshes.empty()


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b"[" * 5000, message(timestamp="now"), message(data={}), message(timestamp=1)),
        message(data={"id": math.inf}),
    ],
)
async def test_message_of_other_shape_is_refused(receiving: Receiving, body: bytes) -> None:
    assert await receiving.send(body) == 400
    assert receiving.refreshes.empty()


async def test_long_message_is_refused(receiving: Receiving) -> None:
    assert await receiving.send(message(pad="x" * webhook.MAX_BODY_BYTES)) == 413


async def test_too_many_messages_are_refused(receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_SEEN", 2)
    assert [await receiving.send(message(number)) for number in (1, 2, 3)] == [202, 202, 503]


async def test_slow_senders_cannot_take_all_places(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "MAX_OPEN", 1)
    host, _, port = receiving.receiver.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
    async with asyncio.timeout(30):
        while await receiving.send(message(), "0") != 503:
            await asyncio.sleep(0.01)
    writer.close()


async def test_unix_socket_receives(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    async with receive(tmp_path, Fleet.of(3), path=str(path)) as receiving:
        assert path.stat().st_mode & 0o777 == 0o660
        assert await receiving.send(message()) == 202
        await receiving.refresh()
    assert not path.exists()


async def test_socket_belongs_to_group_of_proxy(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    async with receive(tmp_path, Fleet.of(3), path=str(path), group="nogroup") as receiving:
        assert await receiving.send(message()) == 202
        assert path.stat().st_gid == grp.getgrnam("nogroup").gr_gid


async def test_unknown_group_of_socket_is_named(tmp_path: Path) -> None:
    secret_file = tmp_path / "webhook.secret"
    secret_file.write_bytes(SECRET)
    params = {"secret_file": str(secret_file), "path": str(tmp_path / "s"), "group": "no-such-group"}
    async with open_fake(tmp_path, Fleet.of(1)) as server:
        receiver = WebhookReceiver(server.inventory(), params, SystemClock())
        with pytest.raises(CannotListen, match="no group 'no-such-group'"):
            await receiver.run(lambda _: None, lambda: None)


async def test_short_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "webhook.secret"
    secret.write_text("short\n")
    async with open_fake(tmp_path, Fleet.of(1)) as server:
        params = {"secret_file": str(secret), "listen": "127.0.0.1:1"}
        with pytest.raises(SourceFailed, match="is too short; write a secret of at least 16 bytes"):
            await WebhookReceiver(server.inventory(), params, SystemClock()).run(lambda _: None, lambda: None)


async def test_source_without_webhook_opens_no_port(tmp_path: Path) -> None:
    async with open_fake(tmp_path, Fleet.of(1)) as server:
        receiver = WebhookReceiver(server.inventory(), None, SystemClock())
        task = asyncio.create_task(receiver.run(lambda _: None, lambda: None))
        await asyncio.sleep(0)
        assert not task.done()
        assert receiver.address == ""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
