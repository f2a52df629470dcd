"""The HTTP server: it checks requests, calls handlers, and writes responses.

Every malformed request is refused before a handler sees it, and every exception
of a handler becomes a response.  It knows no rule of a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from machines.model.events import RequestDenied
from rolloutd.concurrency import threads
from rolloutd.control import responses
from rolloutd.control.identity import AccountLookup, CachedNameService, Identity, identify, read_peer_uid
from rolloutd.control.limits import DenialLog, LimitedProtocol, Limits
from rolloutd.control.route_table import ROUTES
from rolloutd.control.routes import Created, LineStream, Request, Route, Services, shared_answer
from rolloutd.errors import NotAllowed, NotLeader, RolloutdError, StoreFailed
from rolloutd.service.listen_socket import BACKLOG, ListenSocket, bind

log = logging.getLogger(__name__)

MAX_STREAMS = 256
"""Streams open at once: a console for each member of a large team, at most some hundred megabytes."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Bytes of a JSON body: twice the largest plan, because JSON writes some characters as six."""

MAX_UPLOAD_BYTES = 64 * 1024 * 1024

MAX_UPLOADS = 4
"""Uploads read at once: each stays in memory until its hash is known."""

MAX_REQUESTS = 256
"""Requests in work at once; each waits for its body, the store or a source."""

MAX_HEAVY = 4
"""Verifications of the audit at once; one occupies a core for some seconds per 100,000 entries."""

MAX_DENIAL_CHARS = 500
"""Characters of a denied call, and of its reason, in the audit, which keeps them for ever."""

BODY_TIMEOUT_S = 60.0
"""How long a client on this machine may take to send its body."""

HANDLER_TIMEOUT_S = 120.0
"""How long a handler may take; the slowest fetches a git repository for a submit."""

SHUTDOWN_TIMEOUT_S = 2.0
"""Grace period of open responses when the daemon stops; clients resume streams."""


class ControlServer:
    """The HTTP API of one daemon on one Unix socket.

    It creates, watches and removes the socket's file, unless the socket is inherited.
    """

    def __init__(
        self,
        services: Services,
        *,
        path: Path,
        group: str | None = None,
        inherited_socket: socket.socket | None = None,
        accounts: AccountLookup | None = None,
    ) -> None:
        self._services = services
        self._path = path
        self._group = group
        self._inherited_socket = inherited_socket
        self._accounts: AccountLookup = accounts or CachedNameService(services.state.now)
        self._denial_log = DenialLog()
        self._limits = Limits(
            streams=MAX_STREAMS, uploads=MAX_UPLOADS, requests=MAX_REQUESTS, heavy=MAX_HEAVY
        )
        http_log = logging.getLogger(f"{__name__}.http")
        http_log.addFilter(_is_worth_logging)
        self._runner = web.AppRunner(
            self._application(),
            logger=http_log,
            # No access log: the audit has each change, and reads are too many.
            access_log=None,
            # A client that has gone must not keep a handler and its quota.
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )
        self._listener: asyncio.Server | None = None
        self._bound: ListenSocket | None = None

    async def start(self) -> None:
        """Listen; raises CannotListen, AlreadyRunning."""
        await self._runner.setup()
        try:
            await self._listen()
        except BaseException:
            await self._runner.cleanup()
            raise

    async def ensure_listening(self) -> bool:
        """Listen again if the socket's file is gone; return whether it was."""
        if self._inherited_socket is not None or self._bound is None or self._bound.is_in_place():
            return False
        log.warning("the control socket's file is gone; creating it again", extra={"path": str(self._path)})
        if self._listener is not None:
            self._listener.close()
        await self._listen()
        return True

    async def record_denial_numbers(self, *, is_last: bool = False) -> None:
        """Write how many more calls were denied in the minutes that have ended, or with `is_last` so far."""
        await self._commit_denials(self._denial_log.end_windows(self._services.state.now(), is_last=is_last))

    async def stop(self) -> None:
        """End all responses and remove the socket."""
        # The file first: a client must not connect to a daemon that answers no more.
        if self._bound is not None:
            self._bound.remove()
        if self._listener is not None:
            self._listener.close()
        self._services.answers.close()
        await self._runner.cleanup()

    async def _listen(self) -> None:
        if self._inherited_socket is not None:
            sock = self._inherited_socket
        else:
            # In a thread: it waits for the answer of a daemon that may listen there.
            self._bound = await threads.ACCOUNTS.run(bind, self._path, self._group)
            sock = self._bound.sock
        serve = self._runner.server
        assert serve is not None
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: LimitedProtocol(serve(), self._limits.connections), sock=sock, backlog=BACKLOG
        )

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_UPLOAD_BYTES, middlewares=[self._error_middleware])
        for route in ROUTES:
            application.router.add_route(
                route.method, route.path, partial(self._serve, route), expect_handler=_continue_if_expected
            )
        return application

    @web.middleware
    async def _error_middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as exc:
            return responses.from_http_error(exc, request)
        except RolloutdError as exc:
            return responses.from_error(exc)
        except ConnectionError:
            # The client has disconnected; this response goes nowhere.
            return web.Response(status=400)
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("a request failed", extra={"error_id": error_id, "path": request.path})
            return responses.internal_error(error_id)

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        identity = await self._identify(request)
        if identity is None:
            return responses.error_response(
                401,
                "no-credential",
                "the socket: no peer credential; use the daemon's Unix socket",
            )
        # Before the quota, whose share depends on the rank.
        self._limits.remember(identity)
        # Until the response has ended: a heavy stream works while it is sent.
        with contextlib.ExitStack() as held:
            try:
                with self._limits.requests.taking(identity.uid):
                    self._require_leader(route)
                    async with asyncio.timeout(HANDLER_TIMEOUT_S):
                        # Before the body is read: a caller without the right must not delay the others.
                        await route.access.check(self._services.state, identity, dict(request.match_info))
                        parsed = await self._read_request(route, request, identity)
                        if route.is_heavy:
                            held.enter_context(self._limits.heavy.taking(identity.uid))
                        if route.is_shared:
                            answer = await shared_answer(self._services, route.path, route.handler, parsed)
                            return responses.json_response(answer)
                        await self._services.state.advance()
                        result = await route.handler(self._services, parsed)
            except NotAllowed as exc:
                await self._record_denial(identity, f"{route.method} {request.path}", str(exc))
                raise
            except TimeoutError:
                return responses.error_response(
                    503, "too-slow", f"no answer within {HANDLER_TIMEOUT_S:.0f} s; try again"
                )
            if route.streams:
                return await self._stream(request, result, identity.uid)
            status, body = (201, result.body) if isinstance(result, Created) else (200, result)
            return responses.json_response(await responses.encode_in_slices(body), status)

    def _require_leader(self, route: Route) -> None:
        """Raise NotLeader on a standby, unless the store has the answer."""
        if self._services.is_standby and not route.on_standby:
            peers = self._services.leadership.peers
            leader = peers.leader if peers is not None and peers.leader else "another daemon"
            raise NotLeader(f"this daemon: it is a standby, {leader} leads; send the request there")

    async def _identify(self, request: web.Request) -> Identity | None:
        transport = request.transport
        uid = read_peer_uid(transport.get_extra_info("socket") if transport is not None else None)
        if uid is None:
            return None
        settings = self._services.state.settings
        return identify(await self._accounts.account(uid), settings.teams, settings.admins)

    async def _read_request(self, route: Route, request: web.Request, identity: Identity) -> Request[Any]:
        path_params, operation = dict(request.match_info), route.operation
        query = _parse_query(route, request)
        if route.upload_type is not None:
            upload = await self._read_upload(route, request, identity.uid)
            return Request(identity, operation, path_params, query, upload)
        if route.body_model is None:
            return Request(identity, operation, path_params, query)
        raw = await _read_limited(request, MAX_BODY_BYTES)
        if not raw.strip() and route.is_body_optional:
            raw = b"{}"
        return Request(identity, operation, path_params, _parse_body(route.body_model, raw))

    async def _read_upload(self, route: Route, request: web.Request, uid: int) -> bytes:
        if request.content_type != route.upload_type:
            raise responses.BadRequest(f"the body: not {route.upload_type}; send that")
        with self._limits.uploads.taking(uid):
            return await _read_limited(request, MAX_UPLOAD_BYTES)

    async def _record_denial(self, identity: Identity, call: str, reason: str) -> None:
        # A path may hold line breaks and escape sequences, and logs and terminals show these texts.
        text, why = (
            "".join(each if each.isprintable() else "?" for each in raw[:MAX_DENIAL_CHARS])
            for raw in (call, reason)
        )
        await self._commit_denials(
            self._denial_log.record(identity.actor, text, why, self._services.state.now())
        )

    async def _commit_denials(self, events: Sequence[RequestDenied]) -> None:
        for event in events:
            # The denial holds even if the audit cannot be written.
            with contextlib.suppress(StoreFailed):
                await self._services.state.commit([event], actor=event.actor, cause="refused")

    async def _stream(self, request: web.Request, lines: LineStream, uid: int) -> web.StreamResponse:
        self._limits.streams.acquire(uid)
        headers = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            async with contextlib.aclosing(lines) as stream:
                async for line in stream:
                    is_encoded = isinstance(line, bytes)
                    await response.write(line if is_encoded else responses.encode_json(line) + b"\n")
            await response.write_eof()
        except ConnectionError:
            log.debug("a client disconnected during a stream")
        except RolloutdError as exc:
            # The status is sent already; a broken connection makes the client resume.
            log.warning("a stream broke off: %s", exc)
            _abort_connection(request)
        except Exception:
            log.exception("a stream broke off", extra={"path": request.path})
            _abort_connection(request)
        finally:
            self._limits.streams.release(uid)
        return response


async def _continue_if_expected(request: web.Request) -> None:
    """Answer `Expect: 100-continue`; aiohttp would also quote another expectation, which may be no text."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether to keep a record of the HTTP framework: no traceback for a client's fault."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, HttpProcessingError | ConnectionError)


def _abort_connection(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _read_limited(request: web.Request, limit: int) -> bytes:
    """Return the body, of at most `limit` bytes and within BODY_TIMEOUT_S."""
    error = responses.PayloadTooLarge(f"the body: more than {limit // 2**20} MiB; send less")
    if (request.content_length or 0) > limit:
        raise error
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.content.iter_chunked(2**16):
                size += len(chunk)
                if size > limit:
                    raise error
                chunks.append(chunk)
    except TimeoutError:
        raise responses.BadRequest(f"the body: not received in {BODY_TIMEOUT_S:.0f} s; resend it") from None
    except (web.PayloadAccessError, web.RequestPayloadError, ValueError) as exc:
        raise responses.BadRequest(f"the body: not readable ({exc}); send it again") from exc
    return b"".join(chunks)


def _parse_query(route: Route, request: web.Request) -> Any:
    pairs = list(request.query.items())
    if len(pairs) != len({name for name, _ in pairs}):
        raise responses.BadRequest("the query: a parameter occurs twice; send it once")
    try:
        return route.query_model.model_validate(dict(pairs))
    except ValidationError as exc:
        raise responses.BadRequest(f"the query: {responses.describe_validation_error(exc)}") from None


def _parse_body(model: type[BaseModel], raw: bytes) -> Any:
    """Return the model of a JSON body; raises BadRequest with every problem."""
    try:
        body = model.model_validate_json(raw)
    except ValidationError as exc:
        raise responses.BadRequest(f"the body: {responses.describe_validation_error(exc)}") from None
    # JSON parsers keep the last value, but a reviewer of the request may have read the first.
    json.loads(raw, object_pairs_hook=_reject_duplicate_keys)
    return body


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise responses.BadRequest(f"the body: {duplicate!r} occurs twice; send it once")
