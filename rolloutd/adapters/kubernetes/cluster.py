"""Client of one cluster: credentials, bounded connections and JSON requests.

The client reads the kubeconfig again whenever the server rejects its credentials or cannot be reached, so a
renewed token or certificate needs no restart.  Objects stay JSON: the library's models cost a millisecond
each, and a fleet has tens of thousands of nodes and pods.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import yaml

from rolloutd.adapters.bounded_read import read_start
from rolloutd.adapters.kubernetes.answer_slices import Convert, parse_answer, unchanged
from rolloutd.adapters.kubernetes.api_errors import (
    MALFORMED,
    ApiError,
    ClusterUnreachable,
    malformed_answers,
    parse_error,
    require_text,
)
from rolloutd.adapters.kubernetes.watch_stream import probe_peer, read_events
from rolloutd.ports import JSON, report_wait
from rolloutd.texts.formats import join_limited

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

T = TypeVar("T")

MAX_CONCURRENT_REQUESTS = 16
"""Concurrent requests to one server: the share that flow control grants to a single client."""

REQUEST_TIMEOUT_S = 20.0
"""A healthy server answers in milliseconds, one with a new etcd leader in seconds."""

CONNECT_TIMEOUT_S = 5.0
"""TCP sends a second SYN after one second and a third after three."""

CREDENTIALS_TIMEOUT_S = 15.0
"""A kubeconfig's credential plugin may call a cloud API."""

PLUGIN_PAUSES_S = (1.0, 60.0)
"""First and longest pause after a plugin failed or gave nothing new: renewed access is found in a minute."""

PLUGIN_MARGIN_S = 1.0
"""How long after that a plugin is killed: the request has failed by then, and says why."""

PAGE_SIZE = 500
"""Objects per page, as in kubectl: at most about ten megabytes of nodes."""

MAX_PAGES = 2000
"""Pages of one list: a million objects, more than a cluster holds; a server may name a next page behind."""

MAX_RESPONSE_BYTES = 256 * 1024 * 1024
"""Limit of one answer: twenty times a page of nodes."""

MAX_ERROR_BYTES = 1024 * 1024
"""Limit of an error's body, which a proxy in between may write."""

MAX_FLOW_CONTROL_ATTEMPTS = 4
"""Tries of a request that flow control rejects; the server asks for a pause of one second each time."""

DEFAULT_DOMAIN = "rolloutd.io"
"""Prefix of our annotations, unless the settings name another."""

FIELD_MANAGER = "rolloutd"
"""The name under which the server records which fields rolloutd wrote."""

STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


@dataclass(slots=True)
class Backoff:
    """Exponential backoff with jitter, so that many clients do not return at once."""

    first_s: float
    max_s: float
    _next_s: float = 0.0

    def next_s(self) -> float:
        """Return the next wait, a random half to all of the current step."""
        self._next_s = min(self.max_s, self._next_s * 2 or self.first_s)
        return self._next_s * random.uniform(0.5, 1.0)  # noqa: S311  # spreads load, guards nothing

    def reset(self) -> None:
        self._next_s = 0.0


@dataclass(slots=True)
class ObjectList:
    items: list[Any] = field(default_factory=list)
    resource_version: str = ""


class Cluster:
    """An API server by kubeconfig and context; `name` is the cluster's name in the settings.

    `domain` prefixes our annotations on its nodes, `lock_annotations` are those of other tools.  All methods
    raise ClusterUnreachable if the server does not answer and ApiError if it returns an error.
    """

    def __init__(
        self,
        name: str,
        kubeconfig: Path | str,
        context: str | None = None,
        *,
        domain: str = DEFAULT_DOMAIN,
        lock_annotations: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.domain = domain
        self.lock_annotations = lock_annotations
        self.kubeconfig = Path(kubeconfig)
        self.context = context
        self.uncordoned_by_others: dict[str, str] = {}
        """Owner annotations that a watch saw on nodes uncordoned by another client, by node."""
        self._api: ApiClient | None = None
        self._credentials: tuple[JSON, ...] = ()
        self._previous_api: ApiClient | None = None
        self._api_lock = asyncio.Lock()
        self._plugin = _PluginPause()
        # A plugin may call a cloud API: however many requests fail together, it runs once at a time.
        self._load_lock = asyncio.Lock()
        self._loaded: tuple[Any, tuple[JSON, ...]] | None = None
        # Watches hold no slot: they last for minutes and would starve the requests.
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> JSON:
        return await self.request("GET", path, query=query)

    async def list(
        self, path: str, query: Mapping[str, str] | None = None, convert: Convert = unchanged
    ) -> ObjectList:
        """Return all objects of a list, each converted; a list that expires meanwhile is read again."""
        for _ in range(MAX_FLOW_CONTROL_ATTEMPTS):
            try:
                return await self._list(path, dict(query or {}), convert)
            except ApiError as error:
                # The server has dropped the version that the pages are of; only a new list helps.
                if error.status != 410:
                    raise
        raise ClusterUnreachable(f"cluster {self.name}: the list of {path} keeps expiring while it is read")

    async def patch(self, path: str, body: JSON) -> JSON:
        """Merge the body into an object; a resourceVersion in the body must still be current."""
        return await self.request(
            "PATCH",
            path,
            query={"fieldManager": FIELD_MANAGER},
            body=body,
            content_type=STRATEGIC_MERGE_PATCH,
        )

    async def post(self, path: str, body: JSON) -> JSON:
        return await self.request("POST", path, query={"fieldManager": FIELD_MANAGER}, body=body)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: JSON = None,
        content_type: str = "application/json",
        tries: int = MAX_FLOW_CONTROL_ATTEMPTS,
        convert: Convert = unchanged,
    ) -> JSON:
        """Send a request and return its JSON; only flow control and renewed credentials retry."""
        backoff = Backoff(1.0, 5.0)
        for attempt in range(1, tries + 1):
            api = await self._client()
            try:
                answer = await self._request(method, path, query, body, content_type, convert)
                report_wait("")
                return answer
            except ApiError as error:
                if error.is_flow_control:
                    report_wait(f"cluster {self.name} returned {error}")
                if attempt == tries:
                    raise
                # This request or a concurrent one has found renewed credentials, as of a short-lived token.
                if error.status == 401 and self._api is not api and attempt == 1:
                    continue
                if not error.is_flow_control:
                    raise
                await asyncio.sleep(max(error.retry_after_s or 0.0, backoff.next_s()))
        raise AssertionError("unreachable")

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: JSON,
        content_type: str,
        convert: Convert,
    ) -> JSON:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with (
            self._request_slots,
            self._open_response(method, path, query, body, content_type, timeout) as answer,
        ):
            body = await read_start(answer.content, MAX_RESPONSE_BYTES + 1)
            if len(body) > MAX_RESPONSE_BYTES:
                raise ValueError(f"the answer is longer than {MAX_RESPONSE_BYTES // 1024**2} MiB")
            return await parse_answer(body, convert)

    async def read_text(self, path: str, query: Mapping[str, str]) -> str:
        """Return an answer that is not JSON, such as a log."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._request_slots, self._open_response("GET", path, query, None, "", timeout) as answer:
            return (await read_start(answer.content, MAX_RESPONSE_BYTES)).decode(errors="replace")

    @asynccontextmanager
    async def watch(
        self, path: str, query: Mapping[str, str], *, idle_timeout_s: float
    ) -> AsyncIterator[AsyncIterator[Mapping[str, JSON]]]:
        """Open a watch and yield its events until the server ends it or is silent for `idle_timeout_s`."""
        # A watch lasts minutes, so only its silence has a limit: a peer may vanish without closing.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_s)
        watch_query = {**query, "watch": "true"}
        async with self._open_response("GET", path, watch_query, None, "application/json", timeout) as answer:
            probe_peer(answer)
            yield read_events(answer)

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        clients, self._api, self._previous_api = (self._api, self._previous_api), None, None
        for api in clients:
            if api is not None:
                await api.close()

    async def _list(self, path: str, query: dict[str, str], convert: Convert) -> ObjectList:
        page = ObjectList()
        query["limit"] = str(PAGE_SIZE)
        for _ in range(MAX_PAGES):
            chunk = await self.request("GET", path, query=query, convert=convert)
            # The server writes null for an empty list.
            page.items += chunk.get("items") or ()
            with malformed_answers():
                page.resource_version = require_text(chunk["metadata"]["resourceVersion"])
                token = require_text(chunk["metadata"].get("continue") or "")
            if not token:
                return page
            # The token names the version of the first page, so that all pages show one moment.
            query["continue"] = token
        raise ClusterUnreachable(f"cluster {self.name}: the list of {path} has more than {MAX_PAGES} pages")

    @asynccontextmanager
    async def _open_response(
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
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER, "Content-Type": content_type}
        try:
            await api.update_params_for_auth(headers, [], ["BearerToken"])
            response = await api.rest_client.request(
                method, url, headers=headers, body=body, _preload_content=False, _request_timeout=timeout
            )
            async with response:
                if not 200 <= response.status <= 299:
                    await self._raise_api_error(api, response)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            # ValueError: a proxy's answer that is not JSON, or an event longer than any object.
            await self._refresh_credentials(api)
            raise ClusterUnreachable(f"cluster {self.name} does not answer: {_error_text(error)}") from error

    async def _raise_api_error(self, api: ApiClient, response: aiohttp.ClientResponse) -> None:
        body = await read_start(response.content, MAX_ERROR_BYTES + 1)
        # JSON that is cut does not parse, and a word in its raw text would decide what an eviction did.
        text = "" if len(body) > MAX_ERROR_BYTES else body.decode(errors="replace")
        error = parse_error(response.status, response.reason or "", text, response.headers)
        if response.status == 401:
            await self._refresh_credentials(api)
            message = f"{error.message}; it does not accept the credentials of {self.kubeconfig}: renew them"
            raise ApiError(401, error.reason, message)
        raise error

    async def _client(self) -> ApiClient:
        # Requests that begin together would each read the file and open a client.
        async with self._api_lock:
            if self._api is None:
                # Imported here: only a daemon with a cluster loads the library, for a second.
                from kubernetes_asyncio.client import ApiClient

                configuration, credentials = await self._load_configuration()
                # A certificate that is being replaced may not fit its key for a moment.
                with self._access_errors():
                    self._api, self._credentials = ApiClient(configuration), credentials
            return self._api

    async def _refresh_credentials(self, api: ApiClient) -> None:
        """Use changed credentials from the next request on.

        Requests in flight may still use the old client, so the next replacement closes it.
        """
        # Checked again after the wait: a request that failed at the same time may have replaced the client.
        if self._api is api and await self._have_credentials_changed() and self._api is api:
            self._api, old, self._previous_api = None, self._previous_api, api
            if old is not None:
                await old.close()

    async def _have_credentials_changed(self) -> bool:
        try:
            _, credentials = await self._load_configuration()
        except ClusterUnreachable:
            return False
        return credentials != self._credentials

    async def _load_configuration(self) -> tuple[Any, tuple[JSON, ...]]:
        """Return the kubeconfig's content, or the latest while a plugin rests; raises ClusterUnreachable."""
        async with self._load_lock:
            if self._plugin.is_paused(self.kubeconfig):
                if self._plugin.error or self._loaded is None:
                    raise ClusterUnreachable(self._plugin.error)
                return self._loaded
            try:
                loaded = await self._read_kubeconfig()
            except ClusterUnreachable as error:
                self._plugin.begin(self.kubeconfig, str(error))
                raise
            if self._loaded is not None and self._loaded[1] == loaded[1]:
                self._plugin.begin(self.kubeconfig, "")
            else:
                self._plugin.end()
            self._loaded = loaded
            return loaded

    async def _read_kubeconfig(self) -> tuple[Any, tuple[JSON, ...]]:
        """Read the kubeconfig; return it with what identifies its credentials; raises ClusterUnreachable."""
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger

        configuration = Configuration()
        # No limit: requests have their slots, and each watch belongs to one drain or blocked node.  A request
        # that waited for a connection would make the whole cluster count as unreachable.
        configuration.connection_pool_maxsize = 0
        if not self.kubeconfig.is_file():  # a local file of a few kilobytes
            raise ClusterUnreachable(f"cluster {self.name}: there is no kubeconfig {self.kubeconfig}")
        with self._access_errors():
            async with asyncio.timeout(CREDENTIALS_TIMEOUT_S):
                # Nothing is written back: kubectl shares the file.
                document = KubeConfigMerger(str(self.kubeconfig)).config
                self._plugin.is_used = _limit_plugins(document)
                loader = KubeConfigLoader(document, active_context=self.context, config_base_path=None)
                await loader.load_and_set(configuration)
            return configuration, _credentials_of(configuration)

    @contextmanager
    def _access_errors(self) -> Iterator[None]:
        """Raise ClusterUnreachable for everything that a malformed kubeconfig or certificate raises."""
        from kubernetes_asyncio.config import ConfigException

        try:
            yield
        except (ConfigException, OSError, yaml.YAMLError, *MALFORMED, AssertionError) as error:
            raise ClusterUnreachable(
                f"cluster {self.name}: the kubeconfig {self.kubeconfig} gives no access: {_error_text(error)}"
            ) from error


class _PluginPause:
    """The pause after a credential plugin failed, or gave what the server has refused.

    A kubeconfig that was edited ends it, and one without a plugin has none.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.error = ""
        self._backoff = Backoff(*PLUGIN_PAUSES_S)
        self._ends_at = 0.0
        self._file: tuple[int, int] | None = None

    def begin(self, kubeconfig: Path, error: str) -> None:
        """Let the plugin rest, longer each time."""
        if self.is_used:
            self._ends_at = asyncio.get_running_loop().time() + self._backoff.next_s()
            self._file, self.error = _stamp_of(kubeconfig), error

    def end(self) -> None:
        self._backoff.reset()
        self._ends_at, self.error = 0.0, ""

    def is_paused(self, kubeconfig: Path) -> bool:
        now = asyncio.get_running_loop().time()
        return self.is_used and now < self._ends_at and _stamp_of(kubeconfig) == self._file


def _stamp_of(kubeconfig: Path) -> tuple[int, int] | None:
    try:
        found = kubeconfig.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _limit_plugins(document: Any) -> bool:
    """Return whether there is a credential plugin, and let each be killed.

    The library leaves one that hangs behind, with its pipes.
    """
    is_used = False
    for user in document.value["users"]:
        plugin = (user.value.get("user") or {}).get("exec")
        if plugin:
            limit_s = f"{CREDENTIALS_TIMEOUT_S + PLUGIN_MARGIN_S:g}"
            plugin["args"] = ["-s", "KILL", limit_s, plugin["command"], *(plugin.get("args") or ())]
            plugin["command"] = "timeout"
            is_used = True
    return is_used


def _credentials_of(configuration: Any) -> tuple[JSON, ...]:
    """Return all that a connection depends on; a renewed certificate often keeps the name of its file."""
    keys = ("host", "api_key", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "proxy")
    values = [getattr(configuration, key) for key in keys]
    files = [Path(value).read_bytes() for value in values[2:5] if value]
    return (*values, *files)


async def retry_transient(operation: Callable[[], Awaitable[T]], *, timeout_s: float) -> T:
    """Retry while the server is unreachable, overloaded or without a leader; then raise the last error."""
    backoff = Backoff(0.5, 5.0)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await operation()
        except (ClusterUnreachable, ApiError) as error:
            is_transient = isinstance(error, ClusterUnreachable) or error.is_retryable
            if not is_transient or asyncio.get_running_loop().time() >= deadline:
                raise
            if isinstance(error, ClusterUnreachable):
                report_wait(str(error))
        await asyncio.sleep(backoff.next_s())


def api_path(
    resource: str, name: str = "", *, namespace: str = "", group: str = "", subresource: str = ""
) -> str:
    """Return the path of an object or a list; `group` is as in `policy/v1`."""
    root = f"/apis/{group}" if group else "/api/v1"
    within = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    rest = "/".join(quote(each, safe="") for each in (name, subresource) if each)
    return f"{root}{within}/{resource}" + (f"/{rest}" if rest else "")


def _error_text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return "no answer in time" if isinstance(error, TimeoutError) else text


MAX_JOINED = 3
"""Names or sentences in one text; the others are counted."""


def join_names(names: Sequence[str]) -> str:
    return join_limited(names, MAX_JOINED)


def join_sentences(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - MAX_JOINED} more"] if len(texts) > MAX_JOINED else []
    return "; ".join([*texts[:MAX_JOINED], *more])
