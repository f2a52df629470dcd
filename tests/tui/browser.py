"""The console in a real browser: Chromium without a screen, over its own debugging protocol.

    make test-web

Not collected with the other tests: it needs Chromium.
"""

from __future__ import annotations

import asyncio
import base64
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

from tests.support.replay import Voice
from tests.support.replayed import Fleet
from tests.tui.house import small
from tests.tui.terminal import ROOT

LIMIT_S = 120.0
"""How long anything may take to come; Chromium's first start on a loaded machine is the longest."""

LOOK_S = 0.05

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"


class Tab:
    """One tab of the browser: commands to it, and everything that its sockets and its console say."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.received = b""
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Take what the browser says until it ends."""
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told.get("result", {}))
            elif told["method"] == "Network.webSocketFrameReceived":
                frame = told["params"]["response"]
                payload = frame["payloadData"]
                self.received += base64.b64decode(payload) if frame["opcode"] == 2 else payload.encode()
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.complaints.append(told["params"]["entry"]["text"])

    async def do(self, method: str, **params: Any) -> Any:
        """Have the browser do something."""
        self._number += 1
        self._answers[self._number] = future = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(future, LIMIT_S)

    async def evaluate(self, script: str) -> Any:
        """Return what a script in the page says."""
        return (await self.do("Runtime.evaluate", expression=script))["result"].get("value")

    async def type(self, text: str) -> None:
        """Type a text; a line end is the Enter key."""
        for char in text:
            if char == "\n":
                key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
            else:
                key = {"key": char, "text": char}
            await self.do("Input.dispatchKeyEvent", type="keyDown", **key)
            await self.do("Input.dispatchKeyEvent", type="keyUp", key=key["key"])

    async def shows(self, *texts: str) -> None:
        """Wait until all texts were drawn."""
        for _ in range(int(LIMIT_S / LOOK_S)):
            drawn = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", self.received).decode(errors="replace")
            if all(text in drawn for text in texts):
                return
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"{texts} never came: {drawn[-3000:]} {self.complaints}")


@contextmanager
def served(socket: Path) -> Iterator[str]:
    """Serve the console and yield the address that works once."""
    command = [sys.executable, "-m", "rolloutd.cli", "--socket", str(socket), "web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            server.stdout.readline()
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
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
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            address = await _page(session, port)
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Network", "Log", "Runtime"):
                    await tab.do(f"{domain}.enable")
                yield tab
                listening.cancel()
    finally:
        process.kill()
        process.wait()


async def _port(file: Path) -> int:
    for _ in range(int(LIMIT_S / LOOK_S)):
        if file.exists() and file.read_text().strip():
            return int(file.read_text().split()[0])
        await asyncio.sleep(LOOK_S)
    raise AssertionError("Chromium did not start")


async def _page(session: aiohttp.ClientSession, port: int) -> str:
    """Return the address of the first tab's debugger; the port is there before the tab is."""
    for _ in range(int(LIMIT_S / LOOK_S)):
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            for each in await answer.json():
                if each["type"] == "page":
                    return str(each["webSocketDebuggerUrl"])
        await asyncio.sleep(LOOK_S)
    raise AssertionError("Chromium opened no tab")


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    """Yield a fleet that speaks at a socket."""
    fleet, socket = small(), tmp_path_factory.mktemp("s") / "s"
    voice = Voice(fleet, socket)
    try:
        yield fleet, socket
    finally:
        voice.close()


async def test_a_gate_is_approved_in_a_browser(world: tuple[Fleet, Path], tmp_path: Path) -> None:
    fleet, socket = world
    with served(socket) as address:
        async with browser(tmp_path / "profile") as tab:
            await tab.do("Page.navigate", url=address)
            await tab.shows(fleet.id, "1 for you", "waits for votes of infra")
            assert "token" not in await tab.evaluate("location.href")
            await tab.evaluate("document.querySelector('textarea').focus()")
            await tab.type("a")
            await tab.shows("Approve start?")
            await tab.type("seen in a browser\n")
            for _ in range(int(LIMIT_S / LOOK_S)):
                if fleet.calls:
                    break
                await asyncio.sleep(LOOK_S)
            picture = base64.b64decode((await tab.do("Page.captureScreenshot"))["data"])
            (tmp_path / "browser.png").write_bytes(picture)
            assert not tab.complaints
    assert [(path, body["reason"]) for _, path, body in fleet.calls] == [
        (f"/v1/rollouts/{fleet.id}/votes", "seen in a browser")
    ]


async def test_the_address_works_once_and_only_from_here(world: tuple[Fleet, Path]) -> None:
    with served(world[1]) as address:
        page = address.partition("/?")[0] + "/"
        plain = {"allow_redirects": False}
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as guest:
            for path in ("", "ws", "static/js/textual.js", "?token=guess"):
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
