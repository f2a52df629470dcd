"""What is answered when something is wrong, and how an answer is written.

Every error has the shape of wire.Error and says what a person can do about it;
its status says whose turn it is.  Input never causes a status of 500 or above.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from rolloutd.control import wire
from rolloutd.errors import (
    Conflict,
    HostKeyChanged,
    InvalidFile,
    Mistake,
    NodeUnreachable,
    NotAllowed,
    NotFound,
    Passed,
    Refused,
    RolloutdError,
    SourceFailed,
    StoreFailed,
)

MOST_PROBLEMS_TOLD = 10
"""Problems of one request that are told; a person mends no more at once."""

LONGEST_ECHO = 200
"""Characters of what a client sent that are sent back to it."""


class WrongRequest(RolloutdError):
    """The request itself is wrong; says where."""


class TooBig(RolloutdError):
    """The body is bigger than anybody may send."""


def encoded(body: Any) -> bytes:
    """Return JSON in ASCII on one line: safe for every terminal, one line of a stream."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return an answer."""
    return web.Response(body=encoded(body), status=status, content_type="application/json")


def error(status: int, code: str, text: str, mistakes: Sequence[Mistake] = ()) -> web.Response:
    """Return a refusal in the shape of wire.Error."""
    body: wire.Error = {"error": text, "code": code, "errors": [mistake_of(each) for each in mistakes]}
    return json_response(body, status)


def mistake_of(mistake: Mistake) -> wire.Mistake:
    """Return a mistake of a file as it goes over the wire."""
    return {
        "file": mistake.file,
        "line": mistake.line,
        "column": mistake.column,
        "path": mistake.path,
        "found": mistake.found,
        "allowed": mistake.allowed,
        "message": mistake.message,
    }


def of_error(exc: RolloutdError) -> web.Response:
    """Return the answer to an error that was raised on purpose."""
    text = str(exc)
    match exc:
        case WrongRequest():
            return error(400, "wrong-request", text)
        case TooBig():
            return error(413, "too-big", text)
        case InvalidFile():
            return error(422, "invalid-plan", text, exc.mistakes)
        case Passed():
            return error(400, exc.code, exc.text)
        case Refused():
            return error(409, exc.code, exc.text)
        case NotAllowed():
            return error(403, "not-allowed", text)
        case NotFound():
            return error(404, "not-found", text)
        case Conflict():
            return error(409, "conflict", f"{text}; somebody else moved first, look again and repeat")
        case StoreFailed():
            return error(503, "store-failed", f"{text}; nothing was changed")
        case SourceFailed():
            return error(409, "source-failed", text)
        case HostKeyChanged() | NodeUnreachable():
            return error(409, "unreachable", text)
        case _:
            return error(409, "refused", text)


def of_http(exc: web.HTTPException, request: web.Request) -> web.Response:
    """Return the JSON of an error that the HTTP framework found."""
    path = request.path[:LONGEST_ECHO]
    match exc:
        case web.HTTPNotFound():
            return error(404, "no-such-path", f"there is no {path}; GET /v1/openapi.json lists what there is")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(exc.allowed_methods))
            answer = error(405, "wrong-method", f"{request.method} is not for {path}; it takes {allowed}")
            answer.headers["Allow"] = allowed
            return answer
        case web.HTTPRequestEntityTooLarge():
            return error(413, "too-big", "the body is too big")
        case _:
            return error(exc.status, "http", exc.reason)


def of_fault(number: str) -> web.Response:
    """Return the answer to a fault of ours; the number is in the daemon's log."""
    return error(500, "fault", f"this is a fault of rolloutd, number {number}: its log says more")


def told(exc: ValidationError) -> str:
    """Return what is wrong with a request, in one sentence per problem."""
    problems = exc.errors(include_url=False, include_context=False)
    sentences = [_problem(each) for each in problems[:MOST_PROBLEMS_TOLD]]
    if len(problems) > MOST_PROBLEMS_TOLD:
        sentences.append(f"and {len(problems) - MOST_PROBLEMS_TOLD} more")
    return "; ".join(sentences)


def _problem(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])[:LONGEST_ECHO]
    what = problem["msg"]
    if problem["type"] == "extra_forbidden":
        return f"{where} is not known here"
    if problem["type"] == "string_too_short" and not str(problem.get("input", "")).strip():
        return f"{where} is empty, and something must stand there"
    found = problem.get("input")
    shown = (
        f" (found {json.dumps(found)[:LONGEST_ECHO]})" if isinstance(found, str | int | float | bool) else ""
    )
    return f"{where}: {what}{shown}" if where else f"{what}{shown}"
