"""The console in a headless Chromium, over its debugging protocol.

    make test-web

Not collected with the other tests: it needs Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.replay_server import ReplayServer
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import start_gate_fleet
from tests.tui.terminal import ROOT

TIMEOUT_S = 120.0
"""Longer than the first start of Chromium on a loaded machine."""

POLL_INTERVAL_S = 0.05

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"


class Tab:
    """A tab: its commands, and what its web socket and its console received."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._pending_responses: dict[int, asyncio.Future[Any]] = {}
        self.received = b""
        self.console_errors: list[str] = []

    async def listen(self) -> None:
        """Read messages until the browser ends."""
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._pending_responses.pop(event["id"]).set_result(event.get("result", {}))
            elif event["method"] == "Network.webSocketFrameReceived":
                frame = event["params"]["response"]
                payload = frame["payloadData"]
                self.received += base64.b64decode(payload) if frame["opcode"] == 2 else payload.encode()
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.console_errors.append(event["params"]["entry"]["text"])

    async def send_command(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._pending_responses[self._number] = future = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(future, TIMEOUT_S)

    async def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page."""
        return (await self.send_command("Runtime.evaluate", expression=script))["result"].get("value")

    async def type(self, text: str) -> None:
        """Type a text; a line end is the Enter key."""
        for char in text:
            if char == "\n":
                key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            else:
                key = {"key": char, "text": char}
            await self.send_command("Input.dispatchKeyEvent", type="keyDown", **key)
            await self.send_command("Input.dispatchKeyEvent", type="keyUp", key=key["key"])

    async def wait_for_text(self, *texts: str) -> None:
        """Wait until all texts were drawn."""
        for _ in range(int(TIMEOUT_S / POLL_INTERVAL_S)):
            drawn = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", self.received).decode(errors="replace")
            if all(text in drawn for text in texts):
                return
            await asyncio.sleep(POLL_INTERVAL_S)
        raise AssertionError(f"{texts} never came: {drawn[-3000:]} {self.console_errors}")


@contextmanager
def serve_console(socket: Path) -> Iterator[str]:
    """Serve the console in a locale without glyphs, and yield the address that works once."""
    command = [sys.executable, "-m", "rolloutd.cli", "--socket", str(socket), "web"]
    environment = {**os.environ, "LC_ALL": "C"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as server:
        assert server.stdout is not None
        try:
            server.stdout.readline()
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium and yield its tab."""
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--window-size=1200,800",
    ]
    process = subprocess.Popen(
        [CHROMIUM, *words, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = await _wait_for_port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            address = await _wait_for_tab(session, port)
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Network", "Log", "Runtime"):
                    await tab.send_command(f"{domain}.enable")
                yield tab
                listening.cancel()
    finally:
        process.kill()
        process.wait()


async def _wait_for_port(file: Path) -> int:
    for _ in range(int(TIMEOUT_S / POLL_INTERVAL_S)):
        if file.exists() and file.read_text().strip():
            return int(file.read_text().split()[0])
        await asyncio.sleep(POLL_INTERVAL_S)
    raise AssertionError("Chromium did not start")


async def _wait_for_tab(session: aiohttp.ClientSession, port: int) -> str:
    """Return the address of the first tab's debugger; the port is there before the tab is."""
    for _ in range(int(TIMEOUT_S / POLL_INTERVAL_S)):
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            for each in await answer.json():
                if each["type"] == "page":
                    return str(each["webSocketDebuggerUrl"])
        await asyncio.sleep(POLL_INTERVAL_S)
    raise AssertionError("Chromium opened no tab")


@pytest.fixture
def served_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReplayedFleet, Path]]:
    """Yield a fleet served at a socket."""
    fleet, socket = start_gate_fleet(), tmp_path_factory.mktemp("s") / "s"
    server = ReplayServer(fleet, socket)
    try:
        yield fleet, socket
    finally:
        server.close()


async def test_gate_is_approved_in_a_browser(
    served_fleet: tuple[ReplayedFleet, Path], tmp_path: Path
) -> None:
    fleet, socket = served_fleet
    with serve_console(socket) as address:
        async with open_browser(tmp_path / "profile") as tab:
            await tab.send_command("Page.navigate", url=address)
            await tab.wait_for_text(fleet.id, "1 for you", "waits for votes of infra", "\u25c6")
            assert "token" not in await tab.evaluate("location.href")
            # The page has the keyboard without a click.
            await tab.type("a")
            await tab.wait_for_text("Approve start?")
            await tab.type("seen in a browser\n")
            for _ in range(int(TIMEOUT_S / POLL_INTERVAL_S)):
                if fleet.requests:
                    break
                await asyncio.sleep(POLL_INTERVAL_S)
            picture = base64.b64decode((await tab.send_command("Page.captureScreenshot"))["data"])
            (tmp_path / "browser.png").write_bytes(picture)
            assert not tab.console_errors
    assert [(path, body["reason"]) for _, path, body in fleet.requests] == [
        (f"/v1/rollouts/{fleet.id}/votes", "seen in a browser")
    ]


async def test_address_works_once_and_on_loopback_only(served_fleet: tuple[ReplayedFleet, Path]) -> None:
    with serve_console(served_fleet[1]) as address:
        page = address.partition("/?")[0] + "/"
        plain = {"allow_redirects": False}
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as guest:
            for path in ("", "ws", "static/js/textual.js", "?token=guess", "?token=%C3%A9"):
                assert (await guest.get(page + path, **plain)).status == 403
            assert (await guest.get(address, headers={"Host": "evil.example"}, **plain)).status == 403
            first = await guest.get(address, **plain)
            assert (first.status, first.headers["Location"]) == (303, "/")
            assert {"HttpOnly", "SameSite=Strict"} <= set(first.headers["Set-Cookie"].split("; "))
            assert (await guest.get(page, **plain)).status == 200
            assert (
                await guest.get(page + "ws", headers={"Origin": "http://evil.example"}, **plain)
            ).status == 403
        async with aiohttp.ClientSession() as late:
            assert (await late.get(address, **plain)).status == 403


async def test_two_consoles_in_one_browser_keep_their_sessions(
    served_fleet: tuple[ReplayedFleet, Path],
) -> None:
    socket = served_fleet[1]
    with serve_console(socket) as one, serve_console(socket) as other:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            for address in (one, other):
                assert (await browser.get(address, allow_redirects=False)).status == 303
            for address in (one, other):
                assert (await browser.get(address.partition("/?")[0] + "/")).status == 200


async def test_report_fits_a_telephone(served_fleet: tuple[ReplayedFleet, Path], tmp_path: Path) -> None:
    fleet, socket = served_fleet
    command = [sys.executable, "-m", "rolloutd.cli", "--socket", str(socket), "report", fleet.id]
    page = tmp_path / "report.html"
    page.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
    async with open_browser(tmp_path / "profile") as tab:
        telephone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        await tab.send_command("Emulation.setDeviceMetricsOverride", **telephone)
        await tab.send_command("Page.navigate", url=page.as_uri())
        await wait_for_page(tab, "document.body.innerText")
        assert fleet.id in await tab.evaluate("document.body.innerText")
        assert await tab.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert not tab.console_errors


async def wait_for_page(tab: Tab, condition: str) -> None:
    """Wait until a script is true in a loaded page."""
    for _ in range(int(TIMEOUT_S / POLL_INTERVAL_S)):
        if await tab.evaluate(f"document.readyState == 'complete' && !!({condition})"):
            return
        await asyncio.sleep(POLL_INTERVAL_S)
    raise AssertionError(f"never true: {condition}")
