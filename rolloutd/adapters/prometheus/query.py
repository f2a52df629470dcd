"""Instant queries of Prometheus whose result is one number.

A result that is empty, stale, incomplete, not a number or ambiguous raises QueryFailed: no caller takes it
for zero.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from rolloutd.adapters.bounded_read import read_start
from rolloutd.adapters.prometheus.registration import ServerParams
from rolloutd.concurrency import threads
from rolloutd.errors import RolloutdError
from rolloutd.ports import JSON, AdapterContext

MAX_RESPONSE_BYTES = 256 * 1024
"""Limit of a response: one number needs less than a kilobyte, an error message some more."""

MAX_TOKEN_BYTES = 16 * 1024
"""Limit of a token file: a service account's token has two kilobytes."""

MAX_SHOWN_CHARS = 200
"""Limit of a quoted error of the server."""

LOOKBACK = "2m"
"""How old a sample may be if the server takes `lookback_delta`: two missed scrapes of a minute.

Without that, Prometheus answers with samples of the last five minutes.
"""


class QueryFailed(RolloutdError):
    """A query has no usable result; the message names the server and the cause."""


class ServerSilent(QueryFailed):
    """The server gave no answer to a query: it is down, refuses the token, or is not a Prometheus."""


class Queries:
    """The servers of the settings' section `prometheus`."""

    def __init__(self, context: AdapterContext) -> None:
        self._context = context

    async def query(self, query: str, server: str | None, *, timeout_s: float) -> float:
        """Return the number that an instant query results in; raises QueryFailed, ServerSilent."""
        name, target = self._choose(server)
        try:
            async with asyncio.timeout(timeout_s):
                # Read at each query, because tokens are rotated.
                token = await threads.FILES.run(_read_token, target.token_file)
                body = await _post(f"{target.url}/api/v1/query", query, token)
        except TimeoutError:
            raise ServerSilent(f"prometheus {name}: no answer within {timeout_s:.0f} s") from None
        except (QueryFailed, aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerSilent(f"prometheus {name}: {str(error) or type(error).__name__}") from error
        try:
            return _read_number(body)
        except (QueryFailed, RecursionError, ValueError) as error:
            raise QueryFailed(f"prometheus {name}: {str(error) or type(error).__name__}") from error

    def _choose(self, name: str | None) -> tuple[str, ServerParams]:
        servers: Mapping[str, ServerParams] = self._context.settings.section("prometheus")
        if name is None and len(servers) == 1:
            return next(iter(servers.items()))
        if name is None or name not in servers:
            known = ", ".join(servers) or "none"
            wanted = "the plan names no `server`" if name is None else f"there is no server {name}"
            raise QueryFailed(f"prometheus: {wanted}; servers of the settings: {known}")
        return name, servers[name]


def _read_token(file: Path | None) -> str:
    if file is None:
        return ""
    with file.open("rb") as stream:
        return stream.read(MAX_TOKEN_BYTES).decode("ascii").strip()


async def _post(url: str, query: str, token: str) -> bytes:
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    form = {"query": query, "lookback_delta": LOOKBACK}
    async with (
        # Without compression, the limit of an answer is the limit of memory.
        aiohttp.ClientSession(headers=headers, auto_decompress=False) as session,
        # A redirect may lead to another server, which must not get the token.
        session.post(url, data=form, allow_redirects=False) as response,
    ):
        body = await read_start(response.content, MAX_RESPONSE_BYTES + 1)
        if len(body) > MAX_RESPONSE_BYTES:
            raise QueryFailed("the response is too long; aggregate the query to one result")
        if response.status in (401, 403):
            raise QueryFailed(f"HTTP status {response.status}; set token_file to a valid token")
        if response.content_type != "application/json":
            raise QueryFailed(f"HTTP status {response.status} without JSON; check the url of the settings")
        return body


def _read_number(body: bytes) -> float:
    """Return the only number of a response (https://prometheus.io/docs/prometheus/latest/querying/api/)."""
    answer = json.loads(body)
    if not isinstance(answer, dict) or answer.get("status") != "success":
        error = answer.get("error", "no reason given") if isinstance(answer, dict) else "not an object"
        raise QueryFailed(f"the query failed: {str(error)[:MAX_SHOWN_CHARS]}")
    # A server that queries others answers with what it got, and says here what it lacks; a sum of the rest
    # would show a busy node as idle.
    # Prometheus 2.48 to 2.53 puts its remarks on a complete result there too, such as on a counter's name.
    warnings = [each for each in answer.get("warnings") or () if not str(each).startswith("PromQL info:")]
    if warnings:
        raise QueryFailed(f"the result is incomplete: {str(warnings)[:MAX_SHOWN_CHARS]}")
    number = _only_sample(answer.get("data"))
    if math.isnan(number):
        raise QueryFailed("the result is NaN")
    return number


def _only_sample(found: JSON) -> float:
    match found:
        case {"resultType": "scalar", "result": [_, str(value)]}:
            return float(value)
        case {"resultType": "vector", "result": [{"value": [_, str(value)]}]}:
            return float(value)
        case {"resultType": "vector", "result": []}:
            raise QueryFailed("the result is empty; the metric is missing or stale")
        case {"resultType": "vector", "result": list(many)}:
            raise QueryFailed(f"the result has {len(many)} series; aggregate them, such as with sum()")
        case _:
            raise QueryFailed("the result is not a number; use an instant query")
