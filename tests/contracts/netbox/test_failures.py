"""NetBox servers that are down, hang, answer with something else or with half of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from rolloutd.adapters.netbox.http import TimeLimits
from rolloutd.adapters.netbox.registration import NetboxInventoryParams
from rolloutd.errors import SourceFailed
from tests.contracts.netbox.backends import Server, answer_always, answer_once, failure, fake_of, open_fake
from tests.support.fake_netbox import Fleet

DEVICES = "/api/dcim/devices/"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with open_fake(tmp_path, Fleet.of(30, 12)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (
            lambda: web.Response(text="<html>Log in</html>", content_type="text/html"),
            "it answers without JSON, as a login page does; check `url` and any proxy",
        ),
        (
            lambda: web.json_response({"hello": "world"}),
            "its answer is not that of a NetBox (KeyError); check `url`",
        ),
        (lambda: web.json_response([]), "its answer is not that of a NetBox (TypeError); check `url`"),
        (
            lambda: web.json_response({"count": 1, "results": [{"hello": 1}]}),
            "its answer is not that of a NetBox (KeyError); check `url`",
        ),
        (
            lambda: web.Response(text='{"count": 1', content_type="application/json"),
            "it answers without JSON, as a login page does; check `url` and any proxy",
        ),
        (
            lambda: web.json_response({"error": "x", "exception": "OperationalError"}, status=500),
            "HTTP status 500 (OperationalError); check the server",
        ),
        (
            lambda: web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html"),
            "HTTP status 502; check the server",
        ),
        (
            lambda: web.Response(status=404),
            "HTTP status 404; set `url` to the address of NetBox, without /api",
        ),
    ],
)
async def test_answer_of_no_netbox_fails(
    server: Server, response: Callable[[], web.Response], problem: str
) -> None:
    inventory = server.inventory()
    whole = await inventory.refresh()
    fake_of(server).intercept = answer_always(DEVICES, response)
    assert await failure(server) == problem
    fake_of(server).intercept = None
    assert await inventory.refresh() == whole


@pytest.mark.parametrize(
    ("method", "body", "error"),
    [
        ("GET", "null", "TypeError"),
        ("GET", "5", "TypeError"),
        ("GET", '{"results": []}', "KeyError"),
        ("GET", "1" * 5000, "ValueError"),
        ("OPTIONS", "1" * 5000, "ValueError"),
    ],
)
async def test_other_answer_to_check_is_named(server: Server, method: str, body: str, error: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse | None:
        is_asked = request.method == method
        return web.Response(text=body, content_type="application/json") if is_asked else None

    fake_of(server).intercept = answer
    problem = f"its answer is not that of a NetBox ({error}); check `url`"
    assert await server.inventory().find_missing_prerequisites() == [f"netbox/netbox: {problem}"]
    if method == "GET":
        assert await failure(server) == problem


async def test_scattered_500_is_retried_for_reading(server: Server) -> None:
    fake_of(server).intercept = answer_once(DEVICES, lambda: web.Response(status=500), times=2)
    assert await server.inventory().refresh()
    fake_of(server).intercept = answer_once(
        DEVICES, lambda: web.Response(status=429, headers={"Retry-After": "0"})
    )
    assert await server.inventory().refresh()


async def test_silent_server_times_out(server: Server) -> None:
    ending = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse | None:
        await ending.wait()
        return None

    fake_of(server).intercept = hang
    assert await failure(server) == "no answer in 2 tries of 0.5 s; check the server, and the scheme of `url`"
    ending.set()


async def test_server_that_trickles_does_not_outlast_refresh(server: Server) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse | None:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "99999"})
        await response.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            await response.write(b" ")
            await asyncio.sleep(0.01)
        return response

    fake_of(server).intercept = trickle
    limits = TimeLimits(connect_s=0.5, read_s=0.5, refresh_s=0.3)
    with pytest.raises(SourceFailed, match="the refresh did not end within"):
        await server.inventory(limits=limits).refresh()


async def test_second_refresh_does_not_pile_up_behind_hanging_one(server: Server) -> None:
    arrived, ending = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse | None:
        arrived.set()
        await ending.wait()
        return None

    fake_of(server).intercept = hang
    inventory = server.inventory()
    first = asyncio.create_task(inventory.refresh())
    await arrived.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(SourceFailed, match="the read before has not ended; check the server"):
        await inventory.refresh()
    ending.set()


async def test_cut_off_body_fails(server: Server) -> None:
    async def cut(request: web.Request) -> web.StreamResponse | None:
        if request.path != DEVICES:
            return None
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "9999"})
        await response.prepare(request)
        await response.write(b'{"count": 1, "results": [')
        assert request.transport is not None
        request.transport.close()
        return response

    fake_of(server).intercept = cut
    assert await failure(server) == "its answer was cut off; check the server and any proxy before it"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:1", "it cannot be reached; check `url`, the server and the network"),
        ("http://netbox.invalid", "it cannot be reached; check `url`, the server and the network"),
        ("https://{}", "its certificate is not trusted; set `ca_file` or correct `url`"),
    ],
)
async def test_refused_dns_and_https_to_plain_port_fail(server: Server, url: str, problem: str) -> None:
    address = server.url.removeprefix("http://")
    assert await failure(server, url=url.format(address)) == problem


@pytest.mark.parametrize(
    "url", ["netbox.example", "", "http://h/api", "http://u:p@h", "ftp://h", "http://h?x"]
)
def test_url_without_scheme_or_with_api_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        NetboxInventoryParams.model_validate({"url": url, "token_file": "t"})


def test_unused_source_loads_no_http_library() -> None:
    code = (
        "import sys, rolloutd.adapters.netbox.factory;"
        "sys.exit(bool({'requests', 'urllib3', 'pynetbox'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
