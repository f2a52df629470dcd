"""One cluster: its credentials, a bounded number of connections, and plain JSON over them.

Credentials come from a kubeconfig and are read again whenever the server does
not know us or cannot be reached, so a token or a certificate that was renewed
on disk is picked up without a word.  Objects stay as JSON: the library's models
cost a millisecond each, and a fleet has tens of thousands of nodes and pods.
What is asked and what the answers mean is known elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import yaml

from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable, read_error

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

JSON = Any
T = TypeVar("T")

REQUESTS_AT_ONCE = 16
"""Requests under way to one server: a share that its flow control leaves to a single client."""

CONNECTIONS = 96
"""Most connections to one server: the requests, its watch of nodes, one watch of pods per node in hand."""

REQUEST_TIMEOUT_S = 20.0
"""For one request: a healthy server answers in milliseconds, one with a new etcd leader in seconds."""

CONNECT_TIMEOUT_S = 5.0
"""For one connection: a second TCP SYN goes out after one second, a third after three."""

CREDENTIALS_TIMEOUT_S = 15.0
"""For a credential plugin of the kubeconfig, which may ask a cloud."""

PAGE = 500
"""Objects asked for at once: about ten megabytes of nodes at most, and what kubectl asks for."""

FLOW_CONTROL_TRIES = 4
"""How often a request is made again that flow control sent away; it asks for a second each time."""

MANAGER = "rolloutd"
"""The field manager of all our writes: the server remembers by it which fields are ours."""

MERGE = "application/strategic-merge-patch+json"


@dataclass(slots=True)
class Backoff:
    """Waits that double, with jitter, so that many clients do not come back at once."""

    first_s: float
    most_s: float
    _next_s: float = 0.0

    def next_s(self) -> float:
        """Return the next wait, between half and all of it."""
        self._next_s = min(self.most_s, self._next_s * 2 or self.first_s)
        return self._next_s * random.uniform(0.5, 1.0)  # noqa: S311  # spreads load, guards nothing

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next_s = 0.0


@dataclass(slots=True)
class Page:
    """A whole list and the version it was read at."""

    items: list[Mapping[str, JSON]] = field(default_factory=list)
    version: str = ""


class Cluster:
    """An API server, by its kubeconfig and context; `name` is what the settings call it.

    All methods raise ClusterUnreachable when nobody answered and ApiError when
    the server refused.
    """

    def __init__(self, name: str, kubeconfig: Path | str, context: str | None = None) -> None:
        self.name = name
        self.kubeconfig = Path(kubeconfig)
        self.context = context
        self.uncordoned: dict[str, str] = {}
        """Owner annotations that a watch saw on nodes which somebody had uncordoned, by node."""
        self._api: ApiClient | None = None
        self._retired: ApiClient | None = None
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(REQUESTS_AT_ONCE)

    # -- what is asked

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> JSON:
        """Return one object."""
        return await self.request("GET", path, query=query)

    async def list(self, path: str, query: Mapping[str, str] | None = None) -> Page:
        """Return all objects of a list, page by page; a list that expired half-way is read anew."""
        for _ in range(FLOW_CONTROL_TRIES):
            try:
                return await self._list(path, dict(query or {}))
            except ApiError as error:
                if error.status != 410:
                    raise
        raise ClusterUnreachable(f"cluster {self.name}: the list of {path} keeps expiring while it is read")

    async def patch(self, path: str, body: JSON) -> JSON:
        """Merge the body into an object; with a resourceVersion in it only if that is still current."""
        return await self.request(
            "PATCH", path, query={"fieldManager": MANAGER}, body=body, content_type=MERGE
        )

    async def post(self, path: str, body: JSON) -> JSON:
        """Create what the body says."""
        return await self.request("POST", path, query={"fieldManager": MANAGER}, body=body)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JSON = None,
        content_type: str = "application/json",
    ) -> JSON:
        """Ask once and return the answer; flow control is waited out, nothing else is tried again."""
        backoff = Backoff(1.0, 5.0)
        for tried in range(1, FLOW_CONTROL_TRIES + 1):
            try:
                return await self.ask_once(method, path, query=query, body=body, content_type=content_type)
            except ApiError as error:
                if not error.is_flow_control or tried == FLOW_CONTROL_TRIES:
                    raise
                await asyncio.sleep(max(error.retry_after_s or 0.0, backoff.next_s()))
        raise AssertionError("unreachable")

    async def ask_once(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JSON = None,
        content_type: str = "application/json",
    ) -> JSON:
        """Ask once and return the answer, whatever it is."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._places, self._answer(method, path, query, body, content_type, timeout) as answer:
            return json.loads(await answer.read())

    @asynccontextmanager
    async def watch(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AsyncIterator[AsyncIterator[Mapping[str, JSON]]]:
        """Open a watch; yields its events until the server ends it.  Silent for `idle_s`, it is lost."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_s)
        asked = {**query, "watch": "true"}
        async with self._answer("GET", path, asked, None, "application/json", timeout) as answer:
            yield _events(answer)

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        clients, self._api, self._retired = (self._api, self._retired), None, None
        for api in clients:
            if api is not None:
                await api.close()

    # -- how

    async def _list(self, path: str, query: dict[str, str]) -> Page:
        page = Page()
        query["limit"] = str(PAGE)
        while True:
            found = await self.get(path, query)
            page.items += found.get("items") or ()
            page.version = found["metadata"]["resourceVersion"]
            more = found["metadata"].get("continue")
            if not more:
                return page
            query["continue"] = more

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: JSON,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request, its body still to be read; put every way of failing in words."""
        api = await self._client()
        url = str(api.configuration.host) + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": MANAGER, "Content-Type": content_type}
        try:
            await api.update_params_for_auth(headers, [], ["BearerToken"])
            answer = await api.rest_client.request(
                method, url, headers=headers, body=body, _preload_content=False, _request_timeout=timeout
            )
            async with answer:
                if not 200 <= answer.status <= 299:
                    await self._refuse(api, answer)
                yield answer
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: an answer that is no JSON, as a proxy gives; an event longer than any object.
            await self._forget(api)
            raise ClusterUnreachable(f"cluster {self.name} does not answer: {_words(error)}") from error

    async def _refuse(self, api: ApiClient, answer: aiohttp.ClientResponse) -> None:
        body = (await answer.read()).decode(errors="replace")
        error = read_error(answer.status, answer.reason or "", body, answer.headers)
        if answer.status == 401:
            await self._forget(api)
            stale = f"{error.message}; it does not accept the credentials of {self.kubeconfig}: renew them"
            raise ApiError(401, error.reason, stale)
        raise error

    async def _client(self) -> ApiClient:
        async with self._opening:
            if self._api is None:
                self._api = await self._open()
            return self._api

    async def _forget(self, api: ApiClient) -> None:
        """Use new credentials from the next request on, if there are any.

        Other requests may still be under way with the old ones, so those are
        closed when they are replaced the next time.
        """
        if self._api is api and await self._renewed(api):
            self._api, old, self._retired = None, self._retired, api
            if old is not None:
                await old.close()

    async def _renewed(self, api: ApiClient) -> bool:
        """Whether the kubeconfig now says something else than this client knows."""
        try:
            fresh = await self._configuration()
        except ClusterUnreachable:
            return False
        known = api.configuration
        keys = ("host", "api_key", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "proxy")
        return any(getattr(fresh, key) != getattr(known, key) for key in keys)

    async def _open(self) -> ApiClient:
        from kubernetes_asyncio.client import ApiClient

        return ApiClient(await self._configuration())

    async def _configuration(self) -> Any:
        """Return what the kubeconfig says now; raises ClusterUnreachable in the operator's words."""
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config import ConfigException
        from kubernetes_asyncio.config.kube_config import load_kube_config

        configuration = Configuration()
        configuration.connection_pool_maxsize = CONNECTIONS
        try:
            if not self.kubeconfig.is_file():  # a local file of a few kilobytes
                raise ClusterUnreachable(f"cluster {self.name}: there is no kubeconfig {self.kubeconfig}")
            async with asyncio.timeout(CREDENTIALS_TIMEOUT_S):
                await load_kube_config(
                    str(self.kubeconfig),
                    context=self.context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (
            ConfigException,
            OSError,
            TimeoutError,
            yaml.YAMLError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            AssertionError,
        ) as error:
            # The loader trips over a malformed file in many ways, and all mean: no credentials.
            raise ClusterUnreachable(
                f"cluster {self.name}: the kubeconfig {self.kubeconfig} gives no access: {_words(error)}"
            ) from error
        return configuration


async def patiently(ask: Callable[[], Awaitable[T]], *, for_s: float) -> T:
    """Ask until there is an answer, for so many seconds; then raise what the last try met.

    Only what may pass by itself is asked again: a server that is away, too
    busy, or between two leaders.
    """
    backoff = Backoff(0.5, 5.0)
    until = asyncio.get_running_loop().time() + for_s
    while True:
        try:
            return await ask()
        except (ClusterUnreachable, ApiError) as error:
            passing = isinstance(error, ClusterUnreachable) or error.may_pass
            if not passing or asyncio.get_running_loop().time() >= until:
                raise
        await asyncio.sleep(backoff.next_s())


def path_of(kind: str, name: str = "", *, namespace: str = "", group: str = "", part: str = "") -> str:
    """Return an object's or a list's path; `group` as in `policy/v1`, `part` is a subresource."""
    root = f"/apis/{group}" if group else "/api/v1"
    within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    rest = "/".join(quote(each, safe="") for each in (name, part) if each)
    return f"{root}{within}/{kind}" + (f"/{rest}" if rest else "")


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, JSON]]:
    async for line in answer.content:
        if line.strip():
            yield json.loads(line)


def _words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return "no answer in time" if isinstance(error, TimeoutError) else text


def names(objects: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Join names for a sentence; more than a few nobody reads."""
    more = f"{'' if between == ', ' else ';'} and {len(objects) - most} more" if len(objects) > most else ""
    return between.join(objects[:most]) + more


def sentences(said: Sequence[str]) -> str:
    """Join sentences that have commas of their own."""
    return names(said, between="; ")
