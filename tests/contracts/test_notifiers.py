"""The contract of the Notifier port: the fake, and apprise and webhooks against a real web server."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters import apprise_notifier
from rolloutd.adapters.webhook_notifier import WebhookNotifier, load_webhook
from rolloutd.errors import InvalidFile, NotifyFailed
from rolloutd.ports import Message, Notification, Notifier
from tests.contracts.fakes.notifier import FakeNotifier

# apprise looks through all its services when the first is used; one of them imports what Python 3.13 drops.
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")


KEY = bytes(range(32))


def _text_of(notifications: list[dict[str, Any]]) -> str:
    return "\n".join(each["text"] for each in notifications)


class WebhookServer:
    """A web hook on this machine: keeps what it is sent, and refuses when it is told to."""

    def __init__(self) -> None:
        self.got: list[tuple[str, str]] = []
        self.requests: list[tuple[Mapping[str, str], bytes]] = []
        self.location = ""
        self.refuses = False
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                hook.requests.append((dict(self.headers), content))
                body = json.loads(content)
                if not hook.refuses:
                    text = body["message"] if "message" in body else _text_of(body["notifications"])
                    hook.got.append((body["title"], text))
                self.send_response(307 if hook.location else 500 if hook.refuses else 200)
                if hook.location:
                    self.send_header("Location", hook.location)
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def plain_url(self) -> str:
        """Where webhooks are posted."""
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook/t0ken"

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
        notifiers: dict[str, Callable[[], Notifier]] = {
            "fake": lambda: self._fake,
            "apprise": lambda: apprise_notifier.AppriseNotifier(hook.url),
            "webhook": lambda: WebhookNotifier(hook.plain_url, KEY),
        }
        self.notifier = notifiers[kind]()
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


@pytest.fixture(params=["fake", "apprise", "webhook"])
def backend(request: pytest.FixtureRequest, hook: WebhookServer) -> NotifierBackend:
    """Return the fake and the real ones in turn."""
    return NotifierBackend(request.param, hook)


async def test_a_message_arrives_whole(backend: NotifierBackend) -> None:
    text = "run.configure: broken\nrolloutctl status sysctl-x"
    notification = Notification("node-failed", "n1 failed in sysctl-x", text)
    await backend.notifier.send(Message(notification.title, text, [notification]))
    assert backend.read == [("n1 failed in sysctl-x", "run.configure: broken\nrolloutctl status sysctl-x")]


async def test_a_message_without_a_text_arrives(backend: NotifierBackend) -> None:
    await backend.notifier.send(Message("sysctl-x has ended", ""))
    assert [title for title, _ in backend.read] == ["sysctl-x has ended"]


async def test_a_message_that_is_not_taken_is_said_to_be(backend: NotifierBackend) -> None:
    backend.refuse()
    with pytest.raises(NotifyFailed):
        await backend.notifier.send(Message("title", "text"))
    backend.accept()
    await backend.notifier.send(Message("title", "text"))
    assert len(backend.read) == 1


async def test_sending_holds_nobody_up(backend: NotifierBackend) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await backend.notifier.send(Message("title", "text"))
    await asyncio.sleep(0)
    counting.cancel()
    assert turns


async def test_secret_absent_from_names_and_messages(backend: NotifierBackend) -> None:
    backend.refuse()
    with pytest.raises(NotifyFailed) as failed:
        await backend.notifier.send(Message("title", "text"))
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


async def test_webhook_body_and_signature_follow_the_document(hook: WebhookServer) -> None:
    waits = Notification(
        "gate-waits",
        "x-1 waits at continue after canary",
        "a vote",
        "x-1",
        gate="continue",
        wave="canary",
        at=1e9,
    )
    failing = Notification("adapter-failing", "watch ams keeps failing", adapter="watch ams", at=1e9)
    await WebhookNotifier(hook.plain_url, KEY, lambda: 1234567890.5).send(
        Message("two", "", [waits, failing], 3)
    )
    ((headers, content),) = hook.requests
    assert json.loads(content) == {
        "version": 1,
        "title": "two",
        "notifications": [
            {
                "event": "gate-waits",
                "at": "2001-09-09T01:46:40Z",
                "title": "x-1 waits at continue after canary",
                "text": "a vote",
                "rollout": "x-1",
                "node": None,
                "gate": "continue",
                "wave": "canary",
                "adapter": None,
            },
            {
                "event": "adapter-failing",
                "at": "2001-09-09T01:46:40Z",
                "title": "watch ams keeps failing",
                "text": "",
                "rollout": None,
                "node": None,
                "gate": None,
                "wave": None,
                "adapter": "watch ams",
            },
        ],
        "omitted": 3,
    }
    assert headers["webhook-timestamp"] == "1234567890"
    signed = f"{headers['webhook-id']}.1234567890.".encode() + content
    # openssl, so that our own code does not judge itself.
    command = ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{KEY.hex()}", "-binary"]
    digest = subprocess.run(command, input=signed, capture_output=True, check=True).stdout
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


async def test_repeated_webhook_keeps_its_id(hook: WebhookServer) -> None:
    clock = iter((1.0, 61.0, 62.0))
    notifier = WebhookNotifier(hook.plain_url, KEY, lambda: next(clock))
    message = Message("a", "", [Notification("rollout-ended", "a", at=1.0)])
    hook.refuses = True
    with pytest.raises(NotifyFailed, match="it answered 500"):
        await notifier.send(message)
    hook.refuses = False
    await notifier.send(message)
    await notifier.send(Message("a", "", [Notification("rollout-ended", "a", at=2.0)]))
    first, again, other = (headers["webhook-id"] for headers, _ in hook.requests)
    assert first == again != other
    assert hook.requests[0][0]["webhook-signature"] != hook.requests[1][0]["webhook-signature"]


async def test_webhook_follows_no_redirect_and_bounds_texts(hook: WebhookServer) -> None:
    hook.location = f"{hook.plain_url}/elsewhere"
    long = Notification("node-failed", "t" * 9000, "x" * 9000)
    with pytest.raises(NotifyFailed, match="it answered 307"):
        await WebhookNotifier(hook.plain_url, KEY).send(Message("t", "", [long] * 20))
    ((_, content),) = hook.requests
    assert len(content) < 20 * 2 * 2000 + 10_000


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (base64.b64encode(KEY).decode(), 0o644, "mode 644"),
        ("c2hvcnQ=", 0o600, "a key of 5 bytes"),
        ("s3cret!", 0o600, "no key that can be read"),
    ],
)
def test_unusable_webhook_key_is_refused(tmp_path: Path, content: str, mode: int, expected: str) -> None:
    file = tmp_path / "hook.key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(InvalidFile, match=expected) as invalid:
        load_webhook("http://127.0.0.1:1/", file)
    assert "s3cret" not in str(invalid.value)
    file.write_text(f"whsec_{base64.b64encode(KEY).decode()}\n")
    file.chmod(0o600)
    assert load_webhook("http://hooks.example/t0ken", file).name == "webhook hooks.example"
