"""Receiver of NetBox's webhooks: each valid one causes an earlier refresh, and nothing else.

Messages are hints: NetBox does not repeat a lost one and sends none for many changes.  What changed is read
from NetBox with the source's own token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from aiohttp import web

from rolloutd.adapters.netbox.inventory import Hint, NetboxInventory
from rolloutd.adapters.netbox.objects import OBJECT_TYPES
from rolloutd.concurrency import threads
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, Clock, OnNodesChanged, OnObserved, OnTried, ignore_tries
from rolloutd.service.listen_socket import bind, bind_address

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1024 * 1024
"""Limit of a message: one device with its snapshots has 5 KB."""

MAX_AGE_S = 300.0
"""Age of a message that is still accepted, and how far the two clocks may differ."""

MAX_SEEN = 10_000
"""Messages that are remembered as seen; more than this within the age are refused."""

MAX_OPEN = 20
"""Messages that are received at once; a client that opens more is refused."""

RECEIVE_TIMEOUT_S = 10.0
"""Limit of receiving one message, so that idle clients cannot take all places."""

REFRESH_INTERVAL_S = 1.0
"""Shortest time between two refreshes: one change of many objects sends a message for each."""

MIN_SECRET_BYTES = 16

KIND_BY_OBJECT_TYPE = {object_type: kind for kind, object_type in OBJECT_TYPES.items()}


class Refused(Exception):
    """A message is not accepted."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Message:
    """What a message says: an identity for replay, its time (epoch seconds), and the changed object."""

    identity: str
    at: float
    hint: Hint | None


class WebhookReceiver:
    """ports.Watch that observes nothing and reports changes; without parameters it only waits."""

    def __init__(self, inventory: NetboxInventory, params: Mapping[str, JSON] | None, clock: Clock) -> None:
        self._inventory = inventory
        self._params = params
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._open = 0
        self._changed = asyncio.Event()
        self.address = ""

    @property
    def source(self) -> str:
        return self._inventory.source

    async def run(
        self, on_observed: OnObserved, on_nodes_changed: OnNodesChanged, on_tried: OnTried = ignore_tries
    ) -> None:
        """Receive until cancelled; raises SourceFailed or CannotListen."""
        if self._params is None:
            await asyncio.Event().wait()
            return
        async with AsyncExitStack() as stack:
            secret = _read_secret(self.source, Path(self._params["secret_file"]))
            await self._listen(stack, self._params, secret)
            on_tried("")
            while True:
                await self._changed.wait()
                self._changed.clear()
                on_nodes_changed()
                await self._clock.sleep(REFRESH_INTERVAL_S)

    async def _listen(self, stack: AsyncExitStack, params: Mapping[str, JSON], secret: bytes) -> None:
        application = web.Application(client_max_size=MAX_BODY_BYTES)

        async def handle(request: web.Request) -> web.Response:
            return await self._receive(request, secret)

        application.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        if "path" in params:
            bound = await threads.ACCOUNTS.run(bind, Path(params["path"]), params.get("group"))
            stack.callback(bound.remove)
            sock, self.address = bound.sock, params["path"]
        else:
            sock = bind_address(params["listen"], "webhook.listen")
            self.address = "{}:{}".format(*sock.getsockname()[:2])
        await web.SockSite(runner, sock).start()
        log.info("%s: webhooks are received at %s", self.source, self.address)

    async def _receive(self, request: web.Request, secret: bytes) -> web.Response:
        if self._open >= MAX_OPEN:
            return web.Response(status=503, text="too many messages at once\n")
        self._open += 1
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                body = await request.read()
            message = read_message(body, request.headers.get("X-Hook-Signature", ""), secret)
            self._accept(message)
        except Refused as refusal:
            log.debug("%s: webhook refused: %s", self.source, refusal)
            return web.Response(status=refusal.status, text=f"{refusal}\n")
        except TimeoutError:
            return web.Response(status=408, text="the message did not arrive in time\n")
        finally:
            self._open -= 1
        return web.Response(status=202)

    def _accept(self, message: Message) -> None:
        """Remember the object and ask for a refresh; raises Refused for an old or repeated message."""
        now = self._clock.now()
        if abs(now - message.at) > MAX_AGE_S:
            raise Refused(403, "the message's time is not now; check both clocks")
        # Kept for twice the age: a message may come from a clock that is ahead.
        self._seen = {identity: at for identity, at in self._seen.items() if now - at <= 2 * MAX_AGE_S}
        if message.identity in self._seen:
            raise Refused(409, "the message was received before")
        if len(self._seen) >= MAX_SEEN:
            raise Refused(503, "too many messages; the scheduled refresh reads the changes")
        self._seen[message.identity] = now
        self._inventory.add_hint(message.hint)
        self._changed.set()


def read_message(body: bytes, signature: str, secret: bytes) -> Message:
    """Return what a signed message says; raises Refused."""
    expected = hmac.new(secret, body, hashlib.sha512).hexdigest()
    # In constant time, so that the delay shows nothing of the right signature.
    if not hmac.compare_digest(expected.encode(), signature.encode(errors="replace")):
        raise Refused(403, "the signature is not valid")
    try:
        content = json.loads(body)
        at = datetime.fromisoformat(content["timestamp"])
        number, object_type = int(content["data"]["id"]), str(content["object_type"])
        parts = (str(content["request_id"]), object_type, str(number), str(content["event"]))
    # ArithmeticError: json reads `Infinity`, which has no whole number.
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError):
        raise Refused(400, "the message is not that of a NetBox webhook") from None
    if at.tzinfo is None:
        raise Refused(400, "the message's time has no zone")
    # One request changes many objects, and a change of another kind of object may change any node.
    kind = KIND_BY_OBJECT_TYPE.get(object_type)
    return Message("/".join(parts), at.timestamp(), None if kind is None else (kind, number))


def _read_secret(source: str, path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SourceFailed(f"{source}: {path} cannot be read ({error.strerror}); set `secret_file`") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise SourceFailed(
            f"{source}: {path} is too short; write a secret of at least {MIN_SECRET_BYTES} bytes"
        )
    return secret
