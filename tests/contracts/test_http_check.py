"""The check `http` against a real server: the contract of ports.Check, and what it refuses to do."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rolloutd.adapters.http import check as http_check
from rolloutd.adapters.http.check import HttpCheck
from rolloutd.contracts import CheckBackend, CheckContract
from rolloutd.plugin.patterns import MAX_SEARCHED_CHARS
from rolloutd.ports import Failed, Host, Ok, Unknown
from tests.contracts.fakes.clock import START, FakeClock
from tests.contracts.fakes.runner import FakeRunHost, playbook_context
from tests.contracts.ssh_fixtures import step_context


class Site:
    """A server on loopback that counts the requests of each path."""

    def __init__(self) -> None:
        self.status, self.url, self.requested = 200, "", []
        self.headers: Mapping[str, str] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.path)
        self.headers = request.headers
        match request.path:
            case "/redirect":
                raise web.HTTPFound("/secret")
            case "/hang":
                await asyncio.Event().wait()
            case "/endless":
                return await self._endless(request)
        return web.Response(status=self.status, text="service: up\n")

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)


@asynccontextmanager
async def serve(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    server = web.Server(site.answer)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    port = runner.addresses[0][1]
    site.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    try:
        yield site
    finally:
        await runner.cleanup()


async def checked(url: str, *, timeout_s: float = 60.0, **params: Any) -> Ok | Failed | Unknown:
    ctx = step_context(Host("n1"), {"url": url, **params})
    return await HttpCheck(playbook_context(FakeRunHost({}))).check(replace(ctx, deadline=START + timeout_s))


class Backend:
    """A health page that the node answers itself."""

    def __init__(self, site: Site) -> None:
        self.site, self.host, self.clock = site, Host("n1"), FakeClock()
        self.params = {"url": f"{site.url}/healthz", "body": "^service: up"}
        self.check = HttpCheck(playbook_context(FakeRunHost({})))

    async def break_node(self) -> None:
        self.site.status = 503

    async def repair_node(self) -> None:
        self.site.status = 200

    async def state(self) -> object:
        return self.site.status


class TestHttpCheck(CheckContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[CheckBackend]:
        async with serve() as site:
            yield Backend(site)


async def test_wrong_status_and_body_named_with_evidence() -> None:
    async with serve() as site:
        assert await checked(site.url, body="down") == Failed(
            f"n1: GET {site.url}: the body has no match of 'down'", "service: up\n"
        )
        site.status = 503
        found = await checked(site.url)
        assert found == Failed(f"n1: GET {site.url}: expected status 200, found 503", "service: up\n")
        assert isinstance(await checked(site.url, status=503), Ok)


async def test_redirect_not_followed() -> None:
    async with serve() as site:
        found = await checked(f"{site.url}/redirect")
        assert isinstance(found, Failed)
        assert "expected status 200, found 302 (a redirect is not followed)" in found.text
        assert site.requested == ["/redirect"]


async def test_request_carries_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ops password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with serve() as site:
        assert isinstance(await checked(site.url), Ok)
        assert not {"Authorization", "Cookie"} & set(site.headers)


async def test_endless_body_read_to_limit() -> None:
    async with serve() as site, asyncio.timeout(30):
        assert isinstance(await checked(f"{site.url}/endless", body="^x{1000}"), Ok)
        _, body = await http_check._get(f"{site.url}/endless", {})
        assert len(body) == MAX_SEARCHED_CHARS


async def test_silent_server_fails_after_timeout() -> None:
    async with serve() as site:
        found = await checked(f"{site.url}/hang", timeout_s=1.0)
        assert found == Failed(f"n1: GET {site.url}/hang: no answer within 1 s")


async def test_closed_port_fails_and_unknown_name_is_unknown() -> None:
    async with serve() as site:
        url = site.url
    closed = await checked(url)
    assert isinstance(closed, Failed)
    assert closed.text.startswith(f"n1: GET {url}: ")
    assert isinstance(await checked("http://no-such-node.invalid/"), Unknown)
    assert isinstance(await checked("http://[::1"), Failed)


# -- TLS ----------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """A certificate for the name `web.test`, signed by an authority that this machine trusts."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-subj", "/CN=web.test", "-addext", "subjectAltName=DNS:web.test", "-days", "1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    http_check._ssl_context.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    yield context
    http_check._ssl_context.cache_clear()


async def test_certificate_verified_by_server_name(certificate: ssl.SSLContext) -> None:
    async with serve(certificate) as site:
        by_address = await checked(site.url)
        assert isinstance(by_address, Failed)
        assert "certificate" in by_address.text
        assert isinstance(await checked(site.url, tls={"verify": True, "server_name": "web.test"}), Ok)
        assert isinstance(await checked(site.url, tls={"verify": False}), Ok)
