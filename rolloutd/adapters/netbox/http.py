"""HTTP of the NetBox source: one origin, time limits, retries, errors without the token.

It blocks and runs in a thread.  It does not know what it reads.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from pynetbox.core.query import ContentError, Request, RequestError
from requests.adapters import HTTPAdapter

from rolloutd.adapters.json_api import describe_refusal, read_token
from rolloutd.adapters.netbox.objects import read_shape
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
"""Limit of one page: 1,000 whole devices are 3 MB, config contexts can make them ten times larger."""

READ_RETRIES = 1
"""Further tries of a request that got no answer."""

WRITE_METHODS = frozenset({"POST", "PUT"})
"""What the server lists under `actions` of an OPTIONS request, each if the token may do it."""

_CHUNK_BYTES = 65_536


class HttpStatus(SourceFailed):
    """The server refused a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds for a connection, for a pause within an answer, and for a whole refresh.

    The whole ends before the daemon gives the source up, so its thread ends too.
    """

    connect_s: float = 3.05
    read_s: float = 30.0
    refresh_s: float = 100.0


class NetboxSession:
    """The connections of one refresh; raises SourceFailed with the source's name.

    Environment and ~/.netrc are not read: their credentials would replace the token, their proxy would get
    it.
    """

    def __init__(
        self, source: str, url: str, token_file: Path, ca_file: Path | None, limits: TimeLimits
    ) -> None:
        self.source = source
        self._url = url
        self._token = read_token(token_file, self.error)
        self._deadline = time.monotonic() + limits.refresh_s
        self._limits = limits
        self.http = requests.Session()
        self.http.trust_env = False
        # A redirect may lead to another host, which must not get the token.
        self.http.max_redirects = 0
        paths = ssl.get_default_verify_paths()
        # requests would take the authorities of its own package, not those of the machine.
        self.http.verify = str(ca_file) if ca_file else paths.cafile or paths.capath or True
        adapter = _GuardedAdapter(_origin(url), limits, self._deadline)
        self.http.mount("https://", adapter)
        self.http.mount("http://", adapter)

    def close(self) -> None:
        self.http.close()

    def check(self, path: str) -> None:
        """Raise HttpStatus if the server refuses to answer with JSON, SourceFailed for other answers."""
        read_shape(lambda: self._send(lambda: list(self._request(path).get())), self.source)

    def may_write(self, path: str) -> bool:
        """Return whether the token may create or change objects of a list, as far as the server says."""
        try:
            body = read_shape(lambda: self._send(self._request(path).options), self.source)
        except HttpStatus:
            return False  # a proxy may refuse the method
        actions = body.get("actions") if isinstance(body, dict) else None
        return isinstance(actions, dict) and not actions.keys().isdisjoint(WRITE_METHODS)

    def get_page(
        self, path: str, filters: Mapping[str, JSON], limit: int, offset: int
    ) -> tuple[JSON, Sequence[JSON]]:
        """Return the count of a list and one page of it.

        Raises KeyError, TypeError or ValueError for another answer.  The page is named by its offset, because
        the server's `next` link may name another host.
        """
        request = self._request(path, _ListRequest, filters=dict(filters), limit=limit, offset=offset)
        page = self._send(lambda: list(request.get()))
        return request.count, page

    def error(self, problem: str, remedy: str) -> SourceFailed:
        return SourceFailed(f"{self.source}: {problem}; {remedy}")

    def _request(self, path: str, kind: type[Request] = Request, **page: Any) -> Request:
        return kind(self._url + path, self.http, token=self._token, **page)

    def _send(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call of pynetbox; raises SourceFailed, for a refusal HttpStatus."""
        try:
            with self._translated_errors():
                return call()
        except (RequestError, ContentError) as error:
            raise self._refusal(error.req) from None
        except RecursionError:
            raise self.error("its answer is nested too deeply", "check `url` and any proxy") from None

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise SourceFailed in place of the errors of requests."""
        try:
            yield
        except requests.exceptions.TooManyRedirects as error:
            if error.response is not None:
                raise self._refusal(error.response) from None
            raise self.error("it redirects", "set `url` to its final address") from None
        except OtherOrigin:
            raise self.error("the server leads to another host", "set `url` to its final address") from None
        # The exceptions hold the request with its token, so neither they nor their texts are passed on.
        except requests.exceptions.SSLError:
            raise self.error("its certificate is not trusted", "set `ca_file` or correct `url`") from None
        except _TooLong:
            raise self.error("its answer is too long", "narrow `filter`") from None
        except requests.exceptions.ChunkedEncodingError:
            raise self.error("its answer was cut off", "check the server and any proxy before it") from None
        except _Overdue:
            problem = f"the refresh did not end within {self._limits.refresh_s:g} s"
            raise self.error(problem, "check the server, or narrow `filter`") from None
        except (requests.exceptions.Timeout, requests.exceptions.ConnectionError) as error:
            if _is_silent(error):
                problem = f"no answer in {1 + READ_RETRIES} tries of {self._limits.read_s:g} s"
                raise self.error(problem, "check the server, and the scheme of `url`") from None
            raise self.error("it cannot be reached", "check `url`, the server and the network") from None
        except requests.exceptions.RequestException as error:
            raise self.error(f"the request failed ({type(error).__name__})", "check `url`") from None

    def _refusal(self, response: requests.Response) -> HttpStatus:
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):
            body = None
        status = response.status_code
        detail = describe_refusal(body, "exception", self._token)
        return HttpStatus(status, f"{self.source}: {_describe_status(status, detail)}")


class _ListRequest(Request):  # type: ignore[misc]  # pynetbox has no types
    """A request of pynetbox that refuses what is no list; pynetbox would take it for one object."""

    def _make_call(self, *arguments: Any, **options: Any) -> JSON:
        body = super()._make_call(*arguments, **options)
        if not isinstance(body["results"], list):
            raise TypeError("not a list")
        return body


class OtherOrigin(requests.exceptions.RequestException):
    """A redirect or a `next` link leads to another origin, which must not get the token."""


class _TooLong(requests.exceptions.RequestException):
    """An answer is longer than MAX_RESPONSE_BYTES."""


class _Overdue(requests.exceptions.RequestException):
    """The time limit of the whole refresh has passed."""


class _GuardedAdapter(HTTPAdapter):
    """Sends to one origin, with time limits, and retries only what reads."""

    def __init__(self, origin: tuple[str, str, int], limits: TimeLimits, deadline: float) -> None:
        retries = urllib3.Retry(
            total=3,
            connect=2,
            read=READ_RETRIES,
            redirect=0,
            status=3,
            backoff_factor=0.2,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=("GET",),
            raise_on_status=False,
            raise_on_redirect=False,
            retry_after_max=10,
        )
        super().__init__(max_retries=retries)
        self._origin = origin
        self._limits = limits
        self._deadline = deadline

    def send(self, request: requests.PreparedRequest, *_: Any, **arguments: Any) -> requests.Response:
        if _origin(str(request.url)) != self._origin:
            raise OtherOrigin("another origin")
        arguments["timeout"] = (self._limits.connect_s, min(self._limits.read_s, self._remaining_s()))
        response = super().send(request, **{**arguments, "stream": True})
        response._content = self._read(response)
        response._content_consumed = True
        return response

    def _read(self, response: requests.Response) -> bytes:
        """Read the body in the time that is left: a server that sends a byte at a time never times out."""
        body = bytearray()
        try:
            while chunk := response.raw.read1(_CHUNK_BYTES, decode_content=True):
                body += chunk
                self._remaining_s()
                if len(body) > MAX_RESPONSE_BYTES:
                    raise _TooLong("too long")
        except urllib3.exceptions.ReadTimeoutError:
            raise requests.exceptions.ChunkedEncodingError("silent") from None
        except urllib3.exceptions.HTTPError:
            raise requests.exceptions.ChunkedEncodingError("cut off") from None
        finally:
            response.close()
        return bytes(body)

    def _remaining_s(self) -> float:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise _Overdue("the refresh took too long")
        return remaining_s


def _is_silent(error: requests.exceptions.RequestException) -> bool:
    """Return whether the server was reached and did not answer in time."""
    if isinstance(error, requests.exceptions.Timeout):
        return not isinstance(error, requests.exceptions.ConnectTimeout)
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(reason, urllib3.exceptions.ReadTimeoutError)


def _describe_status(status: int, detail: str) -> str:
    match status:
        case 200:
            return "it answers without JSON, as a login page does; check `url` and any proxy"
        case 400:
            return f"it refuses the filter{detail}; correct `filter`"
        case 401 | 403:
            return f"it refuses the token{detail}; check the token and its rights"
        case 404:
            return "HTTP status 404; set `url` to the address of NetBox, without /api"
        case _ if 300 <= status < 400:
            return f"HTTP status {status}, a redirect; set `url` to its final address"
        case _:
            return f"HTTP status {status}{detail}; check the server"


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
