"""The border between the socket and the handlers: HTTP in, values through, HTTP out.

Everything that can be wrong with a request is found here, before a handler sees
it, and everything a handler may raise becomes an answer here.  It knows how to
speak; what is said and who may have it said is the handlers' and the orders'.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from rolloutd.control import answers
from rolloutd.control.handlers import ROUTES
from rolloutd.control.identity import Identity, Names, NameService, identify, peer_of
from rolloutd.control.refusals import Refusals
from rolloutd.control.routes import Call, Created, Desk, Lines, Route
from rolloutd.errors import NotAllowed, RolloutdError, StoreFailed
from rolloutd.service.binding import Bound, bind

log = logging.getLogger("rolloutd.control")

MOST_STREAMS = 256
"""Streams open at once: a console for everybody of a large team, and some hundred megabytes at most."""

LARGEST_BODY = 4 * 1024 * 1024
"""Bytes of a JSON body: twice the largest plan, because JSON writes some characters as six."""

LARGEST_UPLOAD = 64 * 1024 * 1024
"""Bytes of an uploaded tree of playbooks."""

MOST_UPLOADS = 2
"""Uploads taken at once: each is in memory until its hash is known."""

BODY_TIMEOUT_S = 60.0
"""How long a client on this machine may take to send its body."""

ANSWER_TIMEOUT_S = 120.0
"""How long a handler may take; the slowest fetches a git repository for a submit."""

STOP_TIMEOUT_S = 2.0
"""How long open answers are waited for when the daemon stops; streams are resumed by their clients."""


STREAM_HEADERS = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}


class ControlServer:
    """The HTTP API of one daemon on one Unix socket.

    With `listening`, a socket that somebody made for us, no file is made,
    watched or removed.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        path: Path,
        group: str | None = None,
        listening: socket.socket | None = None,
        names: Names | None = None,
    ) -> None:
        self._desk = desk
        self._path = path
        self._group = group
        self._given = listening
        self._names: Names = names or NameService(desk.state.now)
        self._refusals = Refusals()
        self._streams = 0
        self._uploads = asyncio.Semaphore(MOST_UPLOADS)
        http_log = logging.getLogger("rolloutd.control.http")
        http_log.addFilter(_is_ours)
        self._runner = web.AppRunner(
            self._application(),
            logger=http_log,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=STOP_TIMEOUT_S,
        )
        self._site: web.SockSite | None = None
        self._bound: Bound | None = None

    # -- its life

    async def start(self) -> None:
        """Listen and answer; raises CannotListen, AlreadyRunning."""
        await self._runner.setup()
        try:
            await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise

    async def ensure(self) -> bool:
        """Listen again where the socket's file was taken away; return whether that was needed."""
        if self._given is not None or self._bound is None or self._bound.in_place():
            return False
        log.warning("the control socket is gone, making it again", extra={"path": str(self._path)})
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
        await self._listen()
        return True

    async def stop(self) -> None:
        """End all answers and take the socket away."""
        if self._bound is not None:
            self._bound.remove()
        await self._runner.cleanup()

    async def _listen(self) -> None:
        if self._given is not None:
            sock = self._given
        else:
            self._bound = await asyncio.to_thread(bind, self._path, self._group)
            sock = self._bound.sock
        self._site = web.SockSite(self._runner, sock)
        await self._site.start()

    # -- one request

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=LARGEST_UPLOAD, middlewares=[self._border])
        for route in ROUTES:
            application.router.add_route(route.method, route.path, partial(self._serve, route))
        return application

    @web.middleware
    async def _border(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as exc:
            return answers.of_http(exc, request)
        except RolloutdError as exc:
            return answers.of_error(exc)
        except ConnectionError:
            # The client went away in the middle: nobody is left to be answered.
            return web.Response(status=400)
        except Exception:
            number = secrets.token_hex(4)
            log.exception("a request could not be answered", extra={"error_id": number, "path": request.path})
            return answers.of_fault(number)

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        who = await self._who(request)
        if who is None:
            return answers.error(
                401, "no-credential", "the socket does not say who is asking; use the daemon's Unix socket"
            )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                call = await self._call(route, request, who)
                said = await route.handler(self._desk, call)
        except answers.WrongRequest as exc:
            return answers.error(400, "wrong-request", str(exc))
        except NotAllowed as exc:
            await self._note(who, f"{route.method} {request.path}", str(exc))
            raise
        except TimeoutError:
            return answers.error(
                503, "too-slow", f"there was no answer within {ANSWER_TIMEOUT_S:.0f} s; ask again"
            )
        if route.streams:
            return await self._stream(request, said)
        if isinstance(said, Created):
            return answers.json_response(said.body, 201)
        return answers.json_response(said)

    async def _who(self, request: web.Request) -> Identity | None:
        transport = request.transport
        peer = peer_of(transport.get_extra_info("socket") if transport is not None else None)
        if peer is None:
            return None
        account = await self._names.account(peer.uid)
        settings = self._desk.state.settings
        return identify(account, settings.teams.items(), settings.admins)

    async def _call(self, route: Route, request: web.Request, who: Identity) -> Call:
        names, verb = dict(request.match_info), route.handler.__name__
        query = _query(route, request)
        if route.content is not None:
            return Call(who, verb, names, query, content=await self._content(route, request))
        body = await self._body(route, request) if route.body is not None else None
        return Call(who, verb, names, query, body)

    async def _body(self, route: Route, request: web.Request) -> Any:
        raw = await _received(request, LARGEST_BODY)
        if not raw.strip() and route.optional_body:
            raw = b"{}"
        assert route.body is not None
        return _checked(route.body, raw)

    async def _content(self, route: Route, request: web.Request) -> bytes:
        if request.content_type != route.content:
            raise answers.WrongRequest(f"the body must be {route.content}, not {request.content_type}")
        async with self._uploads:
            return await _received(request, LARGEST_UPLOAD)

    async def _note(self, who: Identity, call: str, why: str) -> None:
        text = call.encode("utf-8", "replace").decode()[:500]
        event = self._refusals.note(who.actor, text, why, self._desk.state.now())
        if event is not None:
            # A refusal stays a refusal when it cannot be written.
            with contextlib.suppress(StoreFailed):
                await self._desk.state.commit([event], actor=who.actor, cause="refused")

    # -- streams

    async def _stream(self, request: web.Request, lines: Lines) -> web.StreamResponse:
        if self._streams >= MOST_STREAMS:
            return answers.error(
                409, "too-many-streams", f"{MOST_STREAMS} streams are open already; close one and try again"
            )
        self._streams += 1
        response = web.StreamResponse(
            headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        )
        try:
            await response.prepare(request)
            async with contextlib.aclosing(lines) as told:
                async for line in told:
                    await response.write(answers.encoded(line) + b"\n")
            await response.write_eof()
        except ConnectionError:
            log.debug("a client went away in the middle of a stream")
        except RolloutdError as exc:
            # The status is sent already; an answer that breaks off makes the client resume.
            log.warning("a stream broke off: %s", exc)
            _break_off(request)
        except Exception:
            log.exception("a stream broke off", extra={"path": request.path})
            _break_off(request)
        finally:
            self._streams -= 1
        return response


def _is_ours(record: logging.LogRecord) -> bool:
    """Say whether a line of the HTTP framework is worth keeping: no traceback for bytes that are no HTTP."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, HttpProcessingError)


def _break_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _received(request: web.Request, largest: int) -> bytes:
    """Read the body, no more than `largest` bytes and no longer than BODY_TIMEOUT_S."""
    too_big = answers.TooBig(f"the body has more than {largest} bytes ({largest // 2**20} MiB)")
    if (request.content_length or 0) > largest:
        raise too_big
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.content.iter_chunked(2**16):
                size += len(chunk)
                if size > largest:
                    raise too_big
                chunks.append(chunk)
    except TimeoutError:
        raise answers.WrongRequest(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except (web.PayloadAccessError, ValueError) as exc:
        raise answers.WrongRequest(f"the body cannot be read: {exc}") from exc
    return b"".join(chunks)


def _query(route: Route, request: web.Request) -> Any:
    pairs = list(request.query.items())
    if len(pairs) != len({name for name, _ in pairs}):
        raise answers.WrongRequest("the query: a parameter is given twice")
    try:
        return route.query.model_validate(dict(pairs))
    except ValidationError as exc:
        raise answers.WrongRequest(f"the query: {answers.told(exc)}") from None


def _checked(model: type[BaseModel], raw: bytes) -> Any:
    """Return the model of a JSON body; raises WrongRequest naming everything that is wrong."""
    try:
        body = model.model_validate_json(raw)
    except ValidationError as exc:
        raise answers.WrongRequest(f"the body: {answers.told(exc)}") from None
    # It would be read with the last value, while whoever reviewed the request may have read the first.
    json.loads(raw, object_pairs_hook=_mind_once)
    return body


def _mind_once(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    twice = (
        next((name for name in names if names.count(name) > 1), None)
        if len(set(names)) < len(names)
        else None
    )
    if twice is not None:
        raise answers.WrongRequest(f"the body: {twice!r} is given twice")
