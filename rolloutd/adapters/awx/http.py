"""HTTP of the AWX runner: one origin, a bearer token, time limits, bounded answers, errors without the token.

It does not know what it asks for.  No request that changes something is sent twice.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rolloutd.adapters.bounded_read import read_start
from rolloutd.adapters.json_api import describe_refusal, read_token
from rolloutd.concurrency import threads
from rolloutd.errors import AdapterFailed, RunnerUnavailable
from rolloutd.ports import JSON

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Limit of one page: 200 events with their whole output are 1 MB."""

MAX_PAGES = 500
"""Pages of one list, 100,000 objects: a longer list is not one that a run needs."""

MAX_LIST_BYTES = 128 * 1024 * 1024
"""Size of one list: 100,000 inventories of runs, of 1 KB each."""

PAGE_SIZE = 200
"""AWX's own limit of a page."""

MAX_CONNECTIONS = 8
"""AWX opens a database connection for each request, and its web server has five processes."""

OVERLOADED = frozenset({429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""

REFUSED = frozenset({401, 403})
"""Statuses that say that the account may not do it: the runner's problem, not a node's."""

Query = Mapping[str, str | int]


class AwxRefused(AdapterFailed):
    """AWX answered that it does not do this; `body` is its answer."""

    def __init__(self, status: int, text: str, body: JSON = None) -> None:
        super().__init__(text)
        self.status = status
        self.body = body


class AnswerLost(RunnerUnavailable):
    """AWX may have carried out a request that it did not answer."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds of a connection, and of a request with its answer."""

    connect_s: float = 5.0
    request_s: float = 30.0


class AwxClient:
    """Requests to one AWX; raises RunnerUnavailable if it does not answer, and AwxRefused if it refuses."""

    def __init__(
        self, name: str, url: str, token_file: Path, ca_file: Path | None, limits: TimeLimits | None = None
    ) -> None:
        """`url` includes the prefix of the API, `name` stands before errors."""
        self.name = name
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._ca_file = ca_file
        self._limits = limits or TimeLimits()
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, query: Query | None = None) -> JSON:
        return (await self.request("GET", path, query=query))[1]

    async def list_all(self, path: str, query: Query) -> Sequence[Mapping[str, JSON]]:
        objects: list[Mapping[str, JSON]] = []
        size = 0
        for page in range(1, MAX_PAGES + 1):
            status, content, token = await self._send(
                "GET", path, {**query, "page_size": PAGE_SIZE, "page": page}
            )
            if (size := size + len(content)) > MAX_LIST_BYTES:
                raise self.unavailable(
                    f"{path} is longer than {MAX_LIST_BYTES >> 20} MiB", "remove old objects in AWX"
                )
            answer = self._read(status, content, (200,), token)[1]
            results = answer.get("results") if isinstance(answer, dict) else None
            if not isinstance(results, list) or not all(isinstance(each, dict) for each in results):
                raise self.unavailable(f"{path} is not a list of AWX", "check `url` and `prefix`")
            objects += results
            if not answer.get("next"):
                return objects
        raise self.unavailable(f"{path} has more than {MAX_PAGES} pages", "remove old objects in AWX")

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: JSON = None,
        accepted: Sequence[int] = (200,),
    ) -> tuple[int, JSON]:
        """Send one request; return the status, which is one of `accepted`, and the JSON of the answer."""
        status, content, token = await self._send(method, path, query, body)
        return self._read(status, content, accepted, token)

    async def _send(
        self, method: str, path: str, query: Query | None, body: JSON = None
    ) -> tuple[int, bytes, str]:
        """Send one request; return its status, its content, and the token that must not be quoted."""
        # Read for each request, so that a rotated one is used at once.
        token = await threads.FILES.run(read_token, self._token_file, self.unavailable)
        try:
            session = self._open()
            async with session.request(
                method,
                f"{self._url}/{path}",
                params=query,
                json=body,
                headers={"Authorization": f"Bearer {token}"},
                allow_redirects=False,
            ) as response:
                status = response.status
                content = await read_start(response.content, MAX_ANSWER_BYTES + 1)
        # The exceptions may hold the request with its token, so neither they nor their texts are passed on.
        except aiohttp.ClientConnectorSSLError:
            raise self.unavailable("its TLS is refused", "check `url` and `ca_file`") from None
        except aiohttp.ClientConnectorCertificateError:
            raise self.unavailable(
                "its certificate is not trusted", "set `ca_file` or correct `url`"
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise self.unavailable(
                "it cannot be reached", "check `url`, the server and the network"
            ) from None
        except TimeoutError:
            raise self._lost(f"no answer within {self._limits.request_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(f"its answer was cut off ({type(error).__name__})") from None
        if len(content) > MAX_ANSWER_BYTES:
            raise self._lost("its answer is too long")
        return status, content, token

    def unavailable(self, problem: str, remedy: str) -> RunnerUnavailable:
        return RunnerUnavailable(f"{self.name}: {problem}; {remedy}")

    def refused(self, status: int, problem: str, remedy: str, body: JSON = None) -> AwxRefused:
        return AwxRefused(status, f"{self.name}: {problem}; {remedy}", body)

    def _lost(self, problem: str) -> AnswerLost:
        return AnswerLost(f"{self.name}: {problem}; check the server and any proxy before it")

    def _read(self, status: int, content: bytes, accepted: Sequence[int], token: str) -> tuple[int, JSON]:
        try:
            body = json.loads(content) if content else None
        except (ValueError, RecursionError):
            body = content
        if status in accepted and not isinstance(body, bytes):
            return status, body
        detail = describe_refusal(body, "error", token)
        if status in OVERLOADED:
            raise self._lost(f"HTTP status {status}{detail}")
        if status in REFUSED:
            raise self.unavailable(
                f"it refuses the account{detail}", "check the token and its rights (doctor)"
            )
        if 200 <= status < 300:
            raise self._lost("it answers without JSON, as a login page does")
        if 300 <= status < 400:
            raise self.unavailable(f"HTTP status {status}, a redirect", "set `url` to its final address")
        raise self.refused(status, f"HTTP status {status}{detail}", "see the object in AWX", body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = ssl.create_default_context(cafile=str(self._ca_file) if self._ca_file else None)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=MAX_CONNECTIONS),
                # A compressed answer could be larger in memory than its limit.
                headers={"User-Agent": "rolloutd", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(
                    total=self._limits.request_s, sock_connect=self._limits.connect_s
                ),
                auto_decompress=False,
                # Cookies would make a session, which AWX prefers to the token.
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session
