"""HTTP responses: JSON bodies, and one error shape for every failure.

Every error has the shape of wire_errors.Error and says what the caller can do.  Input
never causes status 500.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

from aiohttp import web
from pydantic import ValidationError

from rolloutd import errors
from rolloutd.control import wire_errors
from rolloutd.control.limits import TooMany
from rolloutd.engine.tasks import compute_over, count_thread_time

MAX_PROBLEMS = 10
"""Problems of one request that are listed; a person fixes no more at once."""

MAX_ECHO_CHARS = 200
"""Characters of a client's input that an error repeats."""

SLICE = 100
"""Items of a list that are encoded at once: a few milliseconds, also for the entries of a large submit."""


P = ParamSpec("P")
Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Encoded(Generic[Body]):
    """JSON that a thread has encoded: the loop neither encodes its thousands of objects nor inspects them."""

    text: bytes


class BadRequest(errors.RolloutdError):
    """The request is malformed."""


class PayloadTooLarge(errors.RolloutdError):
    """The body exceeds the limit."""


_STATUSES: Mapping[type[errors.RolloutdError], tuple[int, str]] = {
    BadRequest: (400, "wrong-request"),
    PayloadTooLarge: (413, "too-big"),
    errors.NotAllowed: (403, "not-allowed"),
    errors.AccountUnknown: (503, "account-unknown"),
    errors.NotFound: (404, "not-found"),
    errors.Conflict: (409, "conflict"),
    errors.StoreFailed: (503, "store-failed"),
    errors.NotLeader: (503, "not-leader"),
    errors.SourceFailed: (409, "source-failed"),
    errors.HostKeyChanged: (409, "unreachable"),
    errors.NodeUnreachable: (409, "unreachable"),
}


def encode_json(body: Any) -> bytes:
    """Return JSON in ASCII on one line: safe for every terminal, and one line of a stream."""
    # NaN is not JSON: such a bug must fail here and not in a client.
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


async def encode_in_slices(body: Any) -> bytes:
    """Return the same JSON; between the slices of a long list, the loop does other work."""
    parts: list[bytes] = []
    for part in _json_parts(body):
        if parts:
            await asyncio.sleep(0)
        parts.append(part)
    return b"".join(parts)


async def encode_rows(
    rows: int, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs
) -> Encoded[Any]:
    """Return what a computation over so many rows gives; over many it runs, and is encoded, in a thread."""

    def encode() -> Encoded[Any]:
        # In parts too: the loop must get the interpreter in between.
        return Encoded(b"".join(_json_parts(function(*args, **kwargs))))

    return await compute_over(rows, encode)


def _json_parts(body: Any) -> Iterator[bytes]:
    if not isinstance(body, dict) or not any(map(_is_large, body.values())):
        yield encode_json(body)
        return
    opening = b"{"
    for key, value in body.items():
        yield opening + encode_json(key) + b":"
        yield from _list_parts(value) if _is_large(value) else (encode_json(value),)
        opening = b","
    yield b"}"


def _list_parts(values: Sequence[Any]) -> Iterator[bytes]:
    opening = b"["
    for begin in range(0, len(values), SLICE):
        part = values[begin : begin + SLICE]
        if _is_large(part):
            for each in part:
                yield opening
                yield from _json_parts(each)
                opening = b","
        else:
            yield opening + encode_json(part)[1:-1]
        opening = b","
    yield b"]"


def _is_large(value: Any) -> bool:
    """Return whether a list is long, or a list in one of its items is: of a change, the nodes."""
    if not isinstance(value, list):
        return False
    # One loop without calls: a page of nodes has ten thousands of members.
    return len(value) > SLICE or any(
        True
        for each in value
        if isinstance(each, dict)
        for member in each.values()
        if type(member) is list and len(member) > SLICE
    )


SHARE_OF_LOOP = 0.05
"""Share of Python's one processor for the computations of one shared route, on the loop and in threads;
MAX_PAUSE_S raises that of slow ones."""

NEWEST_WEIGHT = 0.2
"""Weight of the newest computation in the mean cost of a route: about the last five decide."""

MAX_PAUSE_S = 0.2
"""Longest wait of a request for the next computation: a person reads no more than five answers a second."""


class SharedAnswers:
    """Answers that do not depend on the caller: equal requests that wait at once share one computation.

    A computation begins after the requests that it answers, so none gets older facts than it may know of.
    Between two computations of a route there is a pause, in proportion to the CPU time of the last ones.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, asyncio.Task[bytes]] = {}
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._not_before: dict[str, float] = {}
        self._means_s: dict[str, float] = {}

    async def get(self, route: str, question: Hashable, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        key = (route, question)
        if key not in self._waiting:
            task = self._waiting[key] = asyncio.create_task(self._compute(route, key, compute))
            self._tasks.add(task)
            task.add_done_callback(self._forget)
        # Shielded: a client that has gone must not take the answer from the others.
        return await asyncio.shield(self._waiting[key])

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _forget(self, task: asyncio.Task[bytes]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, else asyncio logs the one of an answer that all clients gave up

    async def _compute(self, route: str, key: Hashable, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._not_before.get(route, 0.0) - loop.time())
        # A later request needs a later computation: it may know of facts that this one misses.
        del self._waiting[key]
        in_threads, began_s = count_thread_time(), time.thread_time()
        try:
            return await compute()
        finally:
            now = loop.time()
            # CPU time: on a busy machine most of the duration is that of other processes.
            took_s = time.thread_time() - began_s + in_threads.used_s
            # The mean of the last ones: a garbage collection during one of them delays the next one little.
            mean_s = self._means_s.get(route, took_s)
            self._means_s[route] = mean_s = mean_s + (took_s - mean_s) * NEWEST_WEIGHT
            pause = mean_s * (1 / SHARE_OF_LOOP - 1)
            free_at = max(now, self._not_before.get(route, 0.0)) + pause
            self._not_before[route] = min(free_at, now + MAX_PAUSE_S)


def json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def error_response(
    status: int, code: str, text: str, diagnostics: Sequence[errors.Diagnostic] = ()
) -> web.Response:
    body: wire_errors.Error = {
        "error": text,
        "code": code,
        "errors": [diagnostic_body(each) for each in diagnostics],
    }
    return json_response(encode_json(body), status)


def diagnostic_body(diagnostic: errors.Diagnostic) -> wire_errors.Diagnostic:
    return cast("wire_errors.Diagnostic", asdict(diagnostic))


def from_error(exc: errors.RolloutdError) -> web.Response:
    text = str(exc)
    match exc:
        case errors.InvalidFile():
            return error_response(422, "invalid-plan", text, exc.diagnostics)
        case errors.DeadlineInPast() | errors.FailuresNotShown():
            return error_response(400, exc.code, exc.text)
        case errors.Refused():
            return error_response(429 if isinstance(exc, TooMany) else 409, exc.code, exc.text)
        case errors.Conflict():
            text = f"{text}; another change came first, check and repeat"
    status, code = next(
        (found for kind, found in _STATUSES.items() if isinstance(exc, kind)), (409, "refused")
    )
    return error_response(status, code, text)


def from_http_error(exc: web.HTTPException, request: web.Request) -> web.Response:
    path = request.path[:MAX_ECHO_CHARS]
    match exc:
        case web.HTTPNotFound():
            return error_response(
                404, "no-such-path", f"{path}: no such path; GET /v1/openapi.json lists all paths"
            )
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(exc.allowed_methods))
            response = error_response(
                405, "wrong-method", f"{path}: {request.method} is not allowed; use {allowed}"
            )
            response.headers["Allow"] = allowed
            return response
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, "too-big", "the body: too big; send less")
        case _:
            return error_response(exc.status, "http", exc.reason)


def internal_error(error_id: str) -> web.Response:
    """Return the response to a bug; the daemon's log has the same number."""
    return error_response(500, "fault", f"rolloutd: internal error {error_id}; search its log for it")


def describe_validation_error(exc: ValidationError) -> str:
    """Return the problems of a request, one clause each."""
    problems = exc.errors(include_url=False, include_context=False)
    descriptions = [_describe_problem(each) for each in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        descriptions.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "; ".join(descriptions)


def _describe_problem(problem: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])[:MAX_ECHO_CHARS]
    message = problem["msg"].removeprefix("Value error, ")  # pydantic's words before a validator's own
    if problem["type"] == "extra_forbidden":
        return f"{path} is unknown"
    if problem["type"] == "string_too_short" and not str(problem.get("input", "")).strip():
        return f"{path} is empty"
    found = problem.get("input")
    is_scalar = isinstance(found, str | int | float | bool)
    shown = f" (found {json.dumps(found)[:MAX_ECHO_CHARS]})" if is_scalar else ""
    return f"{path}: {message}{shown}" if path else f"{message}{shown}"
