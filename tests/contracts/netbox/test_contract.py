"""The contract of the NetBox source, for the fake server and for a real one."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutd.contracts import InventoryBackend, InventoryContract
from rolloutd.errors import SourceFailed
from rolloutd.ports import DiscoveredNode, Inventory
from tests.contracts.netbox.backends import LISTS, SERVERS, Server


class Backend:
    """A source of all objects; its token becomes invalid."""

    def __init__(self, server: Server, names: set[str]) -> None:
        self._server, self.names = server, names
        self._token = server.other_token(server.token_file.read_text())
        self.inventory: Inventory = server.inventory(token_file=str(self._token))

    async def break_source(self) -> None:
        self._token.write_text("nbt_unknownUnkno.0000000000000000000000000000000000000000")


def suite_of(opening: Any) -> type[InventoryContract]:
    class Suite(InventoryContract):
        @asynccontextmanager
        async def open_backend(self, directory: Path) -> AsyncIterator[InventoryBackend]:
            async with opening(directory) as server:
                yield Backend(server, await server.names())

    return Suite


class TestFakeNetboxInventory(suite_of(SERVERS[0])):
    """The port's contract, against the fake."""


if len(SERVERS) > 1:

    class TestRealNetboxInventory(suite_of(SERVERS[1])):
        """The port's contract, against a real NetBox."""


@pytest.fixture(params=SERVERS)
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with request.param(tmp_path) as opened:
        yield opened


async def used_tags(server: Server) -> list[str]:
    devices = await server.all("devices", "id,tags")
    return sorted({tag["slug"] for each in devices for tag in each["tags"]})[:5]


async def test_labels_and_address_are_those_of_object(server: Server) -> None:
    nodes = {node.name: node for node in await server.inventory(objects=["devices"]).refresh()}
    fields = "id,name,site,tenant,role,platform,rack,status,primary_ip4,primary_ip6"
    for record in await server.all("devices", fields):
        if record["name"] not in nodes:
            continue
        node = nodes[record["name"]]
        expected = {
            "team": record["tenant"] and record["tenant"]["slug"],
            "site": record["site"] and record["site"]["slug"],
            "role": record["role"] and record["role"]["slug"],
            "platform": record["platform"] and record["platform"]["slug"],
            "rack": record["rack"] and record["rack"]["name"],
            "status": record["status"]["value"],
        }
        assert node.labels == {key: value for key, value in expected.items() if value}
        chosen = record["primary_ip4"] or record["primary_ip6"]
        assert node.connection.get("ansible_host") == (chosen and chosen["address"].split("/")[0])


async def test_addresses_have_no_prefix_and_preferred_family(server: Server) -> None:
    addresses = {
        family: {
            node.name: ipaddress.ip_address(node.connection["ansible_host"])
            for node in await server.inventory(address=family).refresh()
            if "ansible_host" in node.connection
        }
        for family in ("ipv4", "ipv6")
    }
    assert addresses["ipv4"].keys() == addresses["ipv6"].keys()
    for name, preferred in addresses["ipv6"].items():
        other = addresses["ipv4"][name]
        assert preferred == other or (preferred.version, other.version) == (6, 4)
    for node in await server.inventory(address="none", labels={}).refresh():
        assert node.connection.keys() == {"status"}


@pytest.mark.parametrize("kind", LISTS)
async def test_each_kind_is_read_alone(server: Server, kind: str) -> None:
    count = (await server.get(LISTS[kind], limit=1))["count"]
    if not count:
        with pytest.raises(SourceFailed, match="no object matches; check `filter`"):
            await server.inventory(objects=[kind]).refresh()
        return
    nodes = await server.inventory(objects=[kind]).refresh()
    assert {node.name for node in nodes} <= {each["name"] for each in await server.all(kind, "id,name")}


async def test_filter_gives_what_server_counts(server: Server) -> None:
    devices = await server.all("devices", "id,name,site,role")
    site, role = devices[0]["site"]["slug"], devices[-1]["role"]["slug"]
    for chosen in ({"site": site}, {"role": [role]}, {"role__n": role}, {"site": [site], "role": role}):
        expected = await server.get(LISTS["devices"], limit=1, **flat(chosen))
        if not expected["count"]:
            continue
        nodes = await server.inventory(objects=["devices"], filter=chosen).refresh()
        unique = unique_names(await server_names(server, chosen))
        assert {node.name for node in nodes} == unique


def flat(chosen: dict[str, object]) -> dict[str, object]:
    return {name: value[0] if isinstance(value, list) else value for name, value in chosen.items()}


async def server_names(server: Server, chosen: dict[str, object]) -> list[str]:
    found: list[str] = []
    while True:
        params = {**flat(chosen), "fields": "id,name", "ordering": "id", "limit": 500, "offset": len(found)}
        page = await server.get(LISTS["devices"], **params)
        found += [each["name"] for each in page["results"]]
        if len(found) >= page["count"]:
            return found


def unique_names(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if name and count == 1}


async def test_tag_list_means_all_tags(server: Server) -> None:
    tags = (await used_tags(server))[:2]
    if len(tags) < 2:
        tags = [*tags, *tags]
    count = 0
    for each in await server.all("devices", "id,name,tags"):
        count += {tag["slug"] for tag in each["tags"]} >= set(tags)
    inventory = server.inventory(objects=["devices"], filter={"tag": tags})
    if count == 0:
        with pytest.raises(SourceFailed, match="no object matches"):
            await inventory.refresh()
        return
    nodes: list[DiscoveredNode] = list(await inventory.refresh())
    assert 0 < len(nodes) <= count


async def test_server_ignores_unknown_filter(server: Server) -> None:
    total = (await server.get(LISTS["devices"], limit=1))["count"]
    for name in ("cf_rolloutd_no_such_field", "rolloutd_no_such_filter"):
        assert (await server.get(LISTS["devices"], limit=1, **{name: "x"}))["count"] == total


LOOKUPS = ("", "__n", "__lt", "__lte", "__gt", "__gte", "__ic", "__ie", "__isw")


async def test_custom_filter_that_server_ignores_is_refused(server: Server) -> None:
    """Each field with each lookup: the server ignores a filter if two values both give all objects."""
    devices = await server.all("devices", "id,custom_fields")
    tried = 0
    for field in (await server.get("/api/extras/custom-fields/", limit=500))["results"]:
        values = {query_text(each["custom_fields"].get(field["name"])) for each in devices} - {""}
        if "dcim.device" not in field["object_types"] or len(values) < 2:
            continue
        for name in (f"cf_{field['name']}{lookup}" for lookup in LOOKUPS):
            is_ignored = [await count(server, name, text) for text in sorted(values)[:2]] == [
                len(devices)
            ] * 2
            is_refused = await refuses(server, name, sorted(values)[0])
            assert is_refused or not is_ignored, name
            if name.endswith((field["name"], "__n")):
                assert is_refused == is_ignored, name
            tried += 1
    assert tried


def query_text(value: Any) -> str:
    """Return one value of a custom field as a filter has it; empty if it has none."""
    first = value[0] if isinstance(value, list) and value else value
    chosen = first.get("id", str(first)) if isinstance(first, dict) else first
    return str(chosen).lower() if isinstance(chosen, bool) else str(chosen or "")


async def count(server: Server, name: str, text: str) -> int | None:
    answer = await server.get(LISTS["devices"], limit=1, **{name: text})
    return answer.get("count")


async def refuses(server: Server, name: str, text: str) -> bool:
    """Return whether the source refuses the filter before it reads a list."""
    try:
        await server.inventory(objects=["devices"], filter={name: text}).refresh()
    except SourceFailed as error:
        if "does not match" in str(error):
            raise
        return "correct `filter`" in str(error) or "name a custom field" in str(error)
    return False


async def test_unknown_custom_field_in_filter_is_refused(server: Server) -> None:
    with pytest.raises(SourceFailed, match="NetBox has no filter cf_rolloutd_no_such_field; name a custom"):
        await server.inventory(filter={"cf_rolloutd_no_such_field": "x"}).refresh()


async def test_unknown_custom_field_in_labels_is_refused(server: Server) -> None:
    path = "custom_fields.rolloutd_no_such_field"
    with pytest.raises(SourceFailed, match="NetBox has no custom field rolloutd_no_such_field; correct"):
        await server.inventory(labels={"pool": path}).refresh()


@pytest.mark.parametrize("name", ["tag", "site", "tenant", "role", "status"])
async def test_unknown_value_of_filter_is_refused(server: Server, name: str) -> None:
    with pytest.raises(SourceFailed, match=f"it refuses the filter \\({name}: .*; correct `filter`"):
        await server.inventory(filter={name: "rolloutd-no-such-value"}).refresh()


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("nbt_unknownUnkno.0000000000000000000000000000000000000000", "Invalid v2 token"),
        ("0000000000000000000000000000000000000000", "Invalid v1 token"),
    ],
)
async def test_invalid_token_is_refused_and_not_shown(server: Server, text: str, detail: str) -> None:
    inventory = server.inventory(token_file=str(server.other_token(f"{text}\n")))
    with pytest.raises(SourceFailed) as failed:
        await inventory.refresh()
    assert str(failed.value) == (
        f"netbox/netbox: it refuses the token ({detail}); check the token and its rights"
    )


async def test_sufficient_token_lacks_nothing(server: Server) -> None:
    assert await server.inventory().find_missing_prerequisites() == []
