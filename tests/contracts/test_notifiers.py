"""The contract of the Notifier port: the fake, and apprise against a real web server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters import apprise_notifier
from rolloutd.errors import InvalidFile, NotifyFailed
from rolloutd.ports import Notifier
from tests.contracts.fakes.notifier import FakeNotifier

# apprise looks through all its services when the first is used; one of them imports what Python 3.13 drops.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


class WebhookServer:
    """A web hook on this machine: keeps what it is sent, and refuses when it is told to."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []
        self.refuses = False
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not hook.refuses:
                    hook.got.append((body["title"], body["message"]))
                self.send_response(500 if hook.refuses else 200)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        """Where apprise sends to."""
        return f"json://someone:s3cret@127.0.0.1:{self.server.server_address[1]}/hook/t0ken"

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def hook() -> Iterator[WebhookServer]:
    """Serve one hook."""
    made = WebhookServer()
    yield made
    made.close()


class NotifierBackend:
    """A notifier, and the people at its other end."""

    def __init__(self, kind: str, hook: WebhookServer) -> None:
        self._fake = FakeNotifier()
        self._hook = hook
        self.notifier: Notifier = self._fake if kind == "fake" else apprise_notifier.AppriseNotifier(hook.url)
        self.kind = kind

    def refuse(self) -> None:
        """Let the next message be refused."""
        self._fake.failures, self._hook.refuses = 1, True

    def accept(self) -> None:
        """Take messages again."""
        self._fake.failures, self._hook.refuses = 0, False

    @property
    def read(self) -> list[tuple[str, str]]:
        """What people have read."""
        return self._fake.sent if self.kind == "fake" else self._hook.got


@pytest.fixture(params=["fake", "apprise"])
def backend(request: pytest.FixtureRequest, hook: WebhookServer) -> NotifierBackend:
    """Return the fake and the real one in turn."""
    return NotifierBackend(request.param, hook)


async def test_a_message_arrives_whole(backend: NotifierBackend) -> None:
    await backend.notifier.send("n1 failed in sysctl-x", "run.configure: broken\nrolloutctl status sysctl-x")
    assert backend.read == [("n1 failed in sysctl-x", "run.configure: broken\nrolloutctl status sysctl-x")]


async def test_a_message_without_a_text_arrives(backend: NotifierBackend) -> None:
    await backend.notifier.send("sysctl-x has ended", "")
    assert [title for title, _ in backend.read] == ["sysctl-x has ended"]


async def test_a_message_that_is_not_taken_is_said_to_be(backend: NotifierBackend) -> None:
    backend.refuse()
    with pytest.raises(NotifyFailed):
        await backend.notifier.send("title", "text")
    backend.accept()
    await backend.notifier.send("title", "text")
    assert len(backend.read) == 1


async def test_sending_holds_nobody_up(backend: NotifierBackend) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await backend.notifier.send("title", "text")
    await asyncio.sleep(0)
    counting.cancel()
    assert turns


async def test_secret_absent_from_names_and_messages(backend: NotifierBackend) -> None:
    backend.refuse()
    with pytest.raises(NotifyFailed) as failed:
        await backend.notifier.send("title", "text")
    for told in (backend.notifier.name, str(failed.value)):
        assert "s3cret" not in told
        assert "t0ken" not in told


def test_urls_come_from_a_file_that_nobody_else_reads(hook: WebhookServer, tmp_path: Path) -> None:
    file = tmp_path / "notify.urls"
    file.touch(mode=0o600)
    file.write_text(f"# people\n\n{hook.url}\n")
    assert [each.name for each in apprise_notifier.load_notifiers(file)] == ["json (line 3 of notify.urls)"]
    file.write_text(f"{hook.url}\nnonsense://s3cret\n")
    with pytest.raises(InvalidFile) as invalid:
        apprise_notifier.load_notifiers(file)
    assert [mistake.line for mistake in invalid.value.diagnostics] == [2]
    assert "s3cret" not in str(invalid.value)
    file.chmod(0o644)
    with pytest.raises(InvalidFile, match="mode 644"):
        apprise_notifier.load_notifiers(file)
    with pytest.raises(InvalidFile):
        apprise_notifier.load_notifiers(tmp_path / "nothing")
