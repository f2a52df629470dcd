"""What NetBox does that an inventory must not believe: one test for each trap, against the fake server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from rolloutd.adapters.netbox.http import NetboxSession, OtherOrigin
from rolloutd.adapters.netbox.registration import NetboxInventoryParams
from rolloutd.errors import SourceFailed
from tests.contracts.netbox.backends import SHORT, Server, answer_always, failure, fake_of, open_fake
from tests.support.fake_netbox import FakeNetbox, Fleet
from tests.support.fake_netbox.fleet import custom_field, device
from tests.support.fake_netbox.server import V1, V2

DEVICES = "/api/dcim/devices/"
SECOND_PAGE = "999"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with open_fake(tmp_path, Fleet.of(30, 12)) as opened:
        yield opened


@pytest.fixture
async def large(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with more devices than one page has."""
    async with open_fake(tmp_path, Fleet.of(1100)) as opened:
        yield opened


# -- filters and custom fields ------------------------------------------------


@pytest.mark.parametrize("name", ["bogus", "cf-pool", "cf_pool__bogus", "limit", "exclude", "rack_id__zz"])
def test_unknown_filter_returns_everything(name: str) -> None:
    given = {"url": "http://netbox.example", "token_file": "t", "filter": {name: "x"}}
    with pytest.raises(ValidationError, match="NetBox ignores an unknown filter"):
        NetboxInventoryParams.model_validate(given)


def test_filter_of_devices_alone_returns_every_machine() -> None:
    given = {"url": "http://netbox.example", "token_file": "t", "filter": {"rack_id": 1}}
    with pytest.raises(ValidationError, match="virtual_machines have no filter rack_id"):
        NetboxInventoryParams.model_validate(given)
    assert NetboxInventoryParams.model_validate({**given, "objects": ["devices"]})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cf_nosuch", "NetBox has no filter cf_nosuch; name a custom field in `filter`"),
        ("cf_hidden", "NetBox has no filter cf_hidden; name a custom field in `filter`"),
        ("cf_pool__gte", "a field of type select has no filter cf_pool__gte; correct `filter`"),
        ("cf_wave__ic", "a field of type integer has no filter cf_wave__ic; correct `filter`"),
        ("cf_frozen__n", "a field of type boolean has no filter cf_frozen__n; correct `filter`"),
        ("cf_groups__n", "a field of type multiselect has no filter cf_groups__n; correct `filter`"),
        ("cf_peers__n", "a field of type multiobject has no filter cf_peers__n; correct `filter`"),
        ("cf_policy", "a field of type json has no filter cf_policy; correct `filter`"),
        ("cf_policy__n", "a field of type json has no filter cf_policy__n; correct `filter`"),
        *(
            (
                f"cf_note__{lookup}",
                (
                    f"note has filter logic loose, so NetBox ignores cf_note__{lookup};"
                    " set it to exact in NetBox, or correct `filter`"
                ),
            )
            for lookup in ("n", "ic", "ie", "isw")
        ),
        ("cf_frozen", "cf_frozen is true or false, and NetBox ignores '1'; correct `filter`"),
        (
            "cf_bay",
            (
                "virtual_machines have no custom field bay; remove virtual_machines from `objects`,"
                " or cf_bay from `filter`"
            ),
        ),
    ],
)
async def test_unknown_cf_filter_returns_everything(server: Server, name: str, problem: str) -> None:
    assert await failure(server, filter={name: "1"}) == problem
    assert DEVICES not in fake_of(server).paths


@pytest.mark.parametrize("value", [["true"], [1], "maybe", 0])
async def test_boolean_field_takes_one_boolean(server: Server, value: object) -> None:
    text = await failure(server, filter={"cf_frozen": value})
    assert text.startswith("cf_frozen is true or false, and NetBox ignores ")


TYPES = (
    *("text", "longtext", "integer", "decimal", "boolean", "date", "datetime", "url", "json"),
    *("select", "multiselect", "object", "multiobject", "a type of a later version"),
)
LOOKUPS = ("", "__n", "__lt", "__lte", "__gt", "__gte", "__ic", "__ie", "__isw")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("logic", ["disabled", "loose", "exact"])
async def test_filter_of_any_field_is_refused_or_applied(server: Server, kind: str, logic: str) -> None:
    """What the server would ignore makes every object a node."""
    fake = fake_of(server)
    fake.fleet.custom_fields.append(custom_field("x", kind, filter_logic=logic))
    values: dict[str, tuple[Any, Any, Any]] = {  # of two objects, and a filter of the second
        "boolean": (False, True, True),
        "integer": (5, 7, 7),
        "decimal": (5.5, 7.5, "7.5"),
        "object": ({"id": 5}, {"id": 7}, 7),
        "multiobject": ([{"id": 5}], [{"id": 7}], 7),
        "multiselect": (["a"], ["b"], "b"),
    }
    one, other, wanted = values.get(kind, ("2026-01-05", "2026-01-07", "2026-01-07"))
    for number, each in enumerate(fake.fleet.devices):
        each["custom_fields"]["x"] = (one, other, None)[number % 3]
    applied = []
    for lookup in LOOKUPS:
        chosen = {"objects": ["devices"], "filter": {f"cf_x{lookup}": wanted}}
        with suppress(SourceFailed):
            nodes = await server.inventory(**chosen).refresh()
            assert len(nodes) < len(fake.fleet.devices), lookup
            applied.append(lookup)
    has_filters = logic != "disabled" and kind in TYPES[:-1] and kind != "json"
    assert ("" in applied) == has_filters


COMPARED: dict[str, Any] = {
    "status": "planned",
    "status__n": "active",
    "site": ["oslo"],
    "site__n": "rome",
    "tenant": "orders",
    "device_type": "model-y",
    "tag": ["canary"],
    "tag__n": "canary",
    "id": [1, 3],
    "name": "METAL-00001",
    "name__n": "metal-00001",
    "name__ic": "0001",
    "name__isw": "Metal-0000",
    "has_primary_ip": False,
    "cf_pool": ["red"],
    "cf_pool__n": "red",
    "cf_pool__ic": "RE",
    "cf_wave": 1,
    "cf_wave__n": 1,
    "cf_wave__gte": 2,
    "cf_frozen": True,
    "cf_groups": "a",
    "cf_spare_site": 3,
    "cf_peers": [2],
    "cf_note": "reboots",
    "cf_vendor__ie": "NORTH",
    "cf_bought__lt": "2026-04-01",
}


@pytest.mark.parametrize("name", COMPARED)
async def test_object_outside_of_filter_fails_source(server: Server, name: str) -> None:
    fake, chosen = fake_of(server), {"objects": ["devices"], "filter": {name: COMPARED[name]}}
    fake.fleet.devices += [device(number) for number in range(100, 106, 2)]
    fake.fleet.devices.append({**device(98), "device_type": {"slug": "model-y"}, "primary_ip4": None})
    fake.fleet.devices[-1] |= {"primary_ip": None, "primary_ip6": None}
    fake.fleet.devices[0]["status"] = {"value": "planned"}
    if name != "cf_spare_site":
        assert 0 < len(await server.inventory(**chosen).refresh()) < len(fake.fleet.devices)
    fake.ignored = frozenset({name})
    text = await failure(server, **chosen)
    assert f" does not match {name}, which NetBox ignored; correct `filter`" in text


@pytest.mark.parametrize("value", ["maybe", 1, [1], ["true"], "yes"])
def test_boolean_filter_without_boolean_is_refused(value: object) -> None:
    given = {"url": "http://netbox.example", "token_file": "t", "filter": {"has_primary_ip": value}}
    with pytest.raises(ValidationError, match="NetBox ignores any other value"):
        NetboxInventoryParams.model_validate(given)


@pytest.mark.parametrize("value", [" ", [" "], ["a", "\t"]])
def test_blank_filter_is_refused(value: object) -> None:
    given = {"url": "http://netbox.example", "token_file": "t", "filter": {"q": value}}
    with pytest.raises(ValidationError):
        NetboxInventoryParams.model_validate(given)


async def test_cf_filter_of_known_field_works(server: Server) -> None:
    nodes = await server.inventory(
        filter={"cf_pool": ["red"]}, labels={"pool": "custom_fields.pool"}
    ).refresh()
    assert {node.labels["pool"] for node in nodes} == {"red"}


async def test_unknown_value_of_filter_is_400(server: Server) -> None:
    text = await failure(server, filter={"site": "nowhere"})
    assert text == (
        "it refuses the filter (site: Select a valid choice. nowhere is not one of the available choices);"
        " correct `filter`"
    )


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("custom_fields.nosuch", "NetBox has no custom field nosuch"),
        ("custom_fields.groups", "custom field groups has the type multiselect"),
        ("custom_fields.policy", "custom field policy has the type json"),
        ("custom_fields.pool.x", "custom field pool has the type select"),
        ("custom_fields.spare_site.slug", "custom field spare_site has the type object"),
    ],
)
async def test_label_that_is_no_text_is_refused(server: Server, path: str, problem: str) -> None:
    assert (await failure(server, labels={"x": path})).startswith(problem)


async def test_object_field_is_its_id(server: Server) -> None:
    labels = {"spare": "custom_fields.spare_site", "limit": "custom_fields.policy.drain.limit"}
    nodes = await server.inventory(labels=labels).refresh()
    assert {node.labels["spare"] for node in nodes} == {"2"}
    assert {node.labels["limit"] for node in nodes} == {"0", "1", "2"}


async def test_config_context_gives_labels(server: Server) -> None:
    labels = {"window": "config_context.patching.window", "none": "config_context.patching.none.deeper"}
    nodes = await server.inventory(labels=labels).refresh()
    assert {node.labels["window"] for node in nodes} == {f"day-{day}" for day in range(7)}


async def test_mapping_in_config_context_is_no_label(server: Server) -> None:
    text = await failure(server, labels={"window": "config_context.patching"})
    assert text.startswith(
        "config_context.patching of metal-00001 is not one text of at most 253 characters;"
    )


async def test_long_text_leaves_out_its_node_only(server: Server) -> None:
    fake = fake_of(server)
    name = fake.fleet.devices[0]["name"]
    fake.fleet.devices[0]["custom_fields"]["note"] = "x" * 254
    inventory = server.inventory(labels={"note": "custom_fields.note"})
    nodes = await inventory.refresh()
    assert name not in {node.name for node in nodes}
    assert len(nodes) == len(await server.inventory().refresh()) - 1
    problem = inventory.left_out[name]
    assert f"custom_fields.note of {name} is not one text" in problem


# -- lists --------------------------------------------------------------------


async def test_error_on_page_2_comes_after_page_1(large: Server) -> None:
    inventory = large.inventory()
    whole = await inventory.refresh()

    async def fail_second_page(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=500) if request.query.get("offset") == SECOND_PAGE else None

    fake_of(large).intercept = fail_second_page
    with pytest.raises(SourceFailed, match="HTTP status 500; check the server"):
        await inventory.refresh()
    fake_of(large).intercept = None
    assert await inventory.refresh() == whole


async def test_half_of_list_is_compared_with_count(large: Server) -> None:
    async def lose_second_page(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("offset") != SECOND_PAGE:
            return None
        return web.json_response({"count": 1100, "next": None, "previous": None, "results": []})

    fake_of(large).intercept = lose_second_page
    assert await failure(large, limits=None) == (
        f"1000 of 1100 objects came from {DEVICES}; the next refresh reads them again"
    )


async def test_object_created_between_pages_is_read_again(large: Server) -> None:
    """Pages by offset return an object twice if another appears before it."""
    devices = fake_of(large).fleet.devices

    async def insert(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("offset") == SECOND_PAGE and len(devices) == 1100:
            devices.insert(0, {**devices[0], "id": 2, "name": "created-meanwhile"})
        return None

    fake_of(large).intercept = insert
    nodes = await large.inventory().refresh()
    assert len(nodes) == len({node.name for node in nodes}) == 1101


async def test_object_replaced_between_pages_hides_no_other(large: Server) -> None:
    """One removed and one added: the count stays, and the second page skips an object."""
    devices, skipped = fake_of(large).fleet.devices, fake_of(large).fleet.devices[1000]["name"]

    async def replace(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("offset") in ("999", "1000") and len(devices) == 1100:
            last = devices[-1]
            devices[0:1] = []
            devices.append({**last, "id": last["id"] + 1, "name": "created-meanwhile"})
            fake_of(large).intercept = None
        return None

    fake_of(large).intercept = replace
    names = {node.name for node in await large.inventory().refresh()}
    assert {skipped, "created-meanwhile"} <= names
    assert len(names) == 1100


async def test_limit_is_page_size_and_primary_ip_is_slow(server: Server) -> None:
    await server.inventory().refresh()
    lists = [request for request in fake_of(server).requests if "limit" in request.query]
    fields = {name for request in lists for name in request.query.get("fields", "").split(",")}
    assert {"primary_ip4", "primary_ip6", "rack"} <= fields
    assert not fields & {"primary_ip", "url", "custom_fields", "config_context"}


async def test_tag_list_means_all_of_them(server: Server) -> None:
    nodes = await server.inventory(filter={"tag": ["canary", "canary"]}).refresh()
    assert len(nodes) == sum(bool(each["tags"]) for each in all_objects(server))


def all_objects(server: Server) -> list[dict[str, Any]]:
    return fake_of(server).fleet.devices + fake_of(server).fleet.machines


async def test_names_may_be_null_or_shared(server: Server) -> None:
    fleet = fake_of(server).fleet
    fleet.devices[0]["name"] = None
    fleet.devices[1]["name"] = fleet.machines[0]["name"]
    nodes = await server.inventory().refresh()
    assert len(nodes) == len(all_objects(server)) - 1
    device, machine = fleet.devices[1], fleet.machines[0]
    assert {node.id for node in nodes if node.name == machine["name"]} == {
        f"devices/{device['id']}",
        f"virtual_machines/{machine['id']}",
    }


async def test_renamed_object_keeps_its_id(server: Server) -> None:
    device, inventory = fake_of(server).fleet.devices[0], server.inventory()
    before = {node.name: node.id for node in await inventory.refresh()}[device["name"]]
    device["name"] = "renamed"
    assert {node.name: node.id for node in await inventory.refresh()}["renamed"] == before


# -- tokens -------------------------------------------------------------------


@pytest.mark.parametrize("token", [V1, V2])
async def test_trailing_newline_of_token_is_stripped(server: Server, token: str) -> None:
    path = server.other_token(f"{token}\n")
    assert await server.inventory(token_file=str(path)).refresh()
    keyword = "Bearer" if token == V2 else "Token"
    sent = {request.headers["Authorization"] for request in fake_of(server).requests}
    assert sent == {f"{keyword} {token}"}


@pytest.mark.parametrize("text", ["", f"Bearer {V2}", f"{V2}\nsecond", "tok\u00e9n"])
async def test_file_without_one_bare_token_is_refused(server: Server, text: str) -> None:
    text = await failure(server, token_file=str(server.other_token(text)))
    assert "other.token" in text
    assert fake_of(server).requests == []


@pytest.mark.parametrize("refusal", ["Token expired", "Token disabled", "Source IP is not permitted"])
async def test_refusal_is_403_with_detail(server: Server, refusal: str) -> None:
    fake_of(server).tokens[V2].refusal = refusal
    expected = f"it refuses the token ({refusal}); check the token and its rights"
    assert await failure(server) == expected
    assert await server.inventory().find_missing_prerequisites() == [f"netbox/netbox: {expected}"]


RIGHTS = {
    "/api/dcim/devices/": "dcim.view_device",
    "/api/virtualization/virtual-machines/": "virtualization.view_virtualmachine",
    "/api/extras/custom-fields/": "extras.view_customfield",
}


@pytest.mark.parametrize("paths", [*([path] for path in RIGHTS), list(RIGHTS)])
async def test_missing_rights_are_named(server: Server, paths: list[str]) -> None:
    fake_of(server).tokens[V2].lacks = frozenset(paths)
    found = await server.inventory(labels={"note": "custom_fields.note"}).find_missing_prerequisites()
    assert found == [f"netbox/netbox: its token lacks {RIGHTS[path]}; grant this right" for path in paths]


async def test_token_that_may_write_is_named(server: Server) -> None:
    fake_of(server).tokens[V2].may_write = True
    assert await server.inventory().find_missing_prerequisites() == [
        "netbox/netbox: its token may write devices and virtual machines; give it a read-only token"
    ]
    assert await server.inventory().refresh()
    assert {request.method for request in fake_of(server).requests} == {"GET", "OPTIONS"}


async def test_server_that_refuses_options_is_no_problem(server: Server) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=405) if request.method == "OPTIONS" else None

    fake_of(server).intercept = refuse
    assert await server.inventory().find_missing_prerequisites() == []


async def test_lost_right_is_refused_token(server: Server) -> None:
    inventory = server.inventory()
    whole = await inventory.refresh()
    fake_of(server).tokens[V2].may_view = False
    assert await failure(server) == (
        "it refuses the token (You do not have permission to perform this action);"
        " check the token and its rights"
    )
    fake_of(server).tokens[V2].may_view = True
    assert await inventory.refresh() == whole


async def test_list_that_is_empty_with_200_is_no_answer(server: Server) -> None:
    fake_of(server).fleet.devices.clear()
    fake_of(server).fleet.machines.clear()
    assert await failure(server) == "no object matches; check `filter` and the token's rights"


async def test_server_before_4_5_has_no_authentication_check(server: Server) -> None:
    fake_of(server).has_authentication_check = False
    assert await server.inventory().refresh()
    fake_of(server).intercept = answer_always(
        "/api/status/", lambda: web.json_response({"detail": "Invalid v1 token"}, status=403)
    )
    assert "it refuses the token (Invalid v1 token)" in await failure(server)


async def test_token_in_answer_is_not_shown(server: Server) -> None:
    body = {"detail": f"{V2} is not welcome"}
    fake_of(server).intercept = answer_always(DEVICES, lambda: web.json_response(body, status=403))
    assert "(*** is not welcome)" in await failure(server)


@asynccontextmanager
async def other_origin() -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Serve on another port, and yield its address and the requests that came."""
    async with FakeNetbox(Fleet()) as other:
        yield other.url, other.requests


async def test_redirect_does_not_get_token(server: Server) -> None:
    async with other_origin() as (url, requests):
        fake_of(server).intercept = answer_always(
            DEVICES, lambda: web.Response(status=302, headers={"Location": url + DEVICES})
        )
        text = await failure(server)
        assert text == "HTTP status 302, a redirect; set `url` to its final address"
        assert requests == []


async def test_next_link_of_other_origin_is_not_followed(large: Server) -> None:
    async with other_origin() as (url, requests):
        fake_of(large).page_host = url
        assert len(await large.inventory().refresh()) == 1100
        assert requests == []


async def test_session_sends_to_no_other_origin(server: Server) -> None:
    """Also for a library that follows links by itself."""
    session = NetboxSession("netbox/x", server.url, server.token_file, None, SHORT)
    async with other_origin() as (url, requests):
        for address in (
            url,
            server.url.replace("http:", "https:"),
            server.url.replace("127.0.0.1", "localhost"),
        ):
            with pytest.raises(OtherOrigin):
                await asyncio.to_thread(session.http.get, address + DEVICES)
        assert requests == fake_of(server).requests == []
    session.close()


async def test_netrc_and_proxy_of_environment_are_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    async with other_origin() as (url, requests):
        for name, value in (
            ("HOME", str(tmp_path)),
            ("http_proxy", url),
            ("NETRC", str(tmp_path / ".netrc")),
        ):
            monkeypatch.setenv(name, value)
        assert await server.inventory().refresh()
        assert requests == []
