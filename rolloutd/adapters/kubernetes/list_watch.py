"""List-and-watch loop that keeps a handler in sync with the API server.

Every end of a watch (its timeout, a lost connection, an expired version, a server restored from a backup)
leads back into the loop.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rolloutd.adapters.kubernetes import api_errors
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster
from rolloutd.ports import JSON

WATCH_TIMEOUT_S = 240
"""The server ends each watch after about this time, so that watches move to new servers."""

IDLE_TIMEOUT_S = 150.0
"""A watch that is silent this long is reopened: the server sends a bookmark about every minute."""

MIN_WATCH_S = 1.0
"""A watch that ends sooner without an event is retried after a pause."""

MAX_EMPTY_WATCHES = 3
"""After this many such ends in a row the server does not know our version: list again."""

INITIAL_BACKOFF_S = 0.5
MAX_BACKOFF_S = 20.0
"""Longest pause between two tries, hence the delay until a recovered cluster is noticed."""


class WatchHandler(ABC):
    """Receives what a list-and-watch loop reads."""

    @abstractmethod
    def parse(self, obj: Mapping[str, JSON]) -> Any:
        """Return what on_list() needs of an object."""

    @abstractmethod
    def on_list(self, objects: Sequence[Any]) -> None:
        """Replace all objects by those of this list, which parse() returned."""

    @abstractmethod
    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        """Apply one object that was ADDED, MODIFIED or DELETED."""

    @abstractmethod
    def on_connected(self) -> None:
        """Trust the objects: the watch is open."""

    def on_watch_ended(self) -> None:  # noqa: B027  # most keep the objects: the next watch continues there
        """Stop refreshing the objects: the next watch reports what happens from now on."""

    @abstractmethod
    def on_disconnected(self, reason: str) -> None:
        """Stop trusting the objects: the server cannot be reached."""


async def run_list_watch(
    cluster: Cluster,
    path: str | Callable[[], Awaitable[str]],
    query: Mapping[str, str],
    handler: WatchHandler,
) -> None:
    """Report every change of a list to the handler until cancelled; a function finds its path."""
    backoff = Backoff(INITIAL_BACKOFF_S, MAX_BACKOFF_S)
    watch = ListWatch(cluster, path, query, handler)
    while True:
        try:
            was_useful = await watch.list_and_watch()
        except api_errors.ApiError as error:
            # An expired version is not an outage: list again at once, unless it was listed just now.
            was_useful = error.status == 410 and not watch.has_just_listed
            # With the right to list alone each try lists again; a version of a kind may be served no longer.
            if error.status in (403, 404, 410):
                watch.resource_version = ""
            if error.status != 410:
                handler.on_disconnected(f"cluster {cluster.name} refused the watch: {error}")
        except api_errors.ClusterUnreachable as error:
            handler.on_disconnected(str(error))
            was_useful = False
        if was_useful:
            backoff.reset()
        else:
            await asyncio.sleep(backoff.next_s())


class ListWatch:
    def __init__(
        self,
        cluster: Cluster,
        path: str | Callable[[], Awaitable[str]],
        query: Mapping[str, str],
        handler: WatchHandler,
    ) -> None:
        self._cluster = cluster
        self._path = "" if callable(path) else path
        self._find_path = path if callable(path) else None
        self._query = dict(query)
        self._handler = handler
        self._empty_watches = 0
        self.resource_version = ""
        self.has_just_listed = False

    async def list_and_watch(self) -> bool:
        """List if necessary, watch until the watch ends, and return whether it brought events or lasted."""
        self.has_just_listed = not self.resource_version
        if not self.resource_version:
            if self._find_path is not None:
                self._path = await self._find_path()
            page = await self._cluster.list(self._path, self._query, self._handler.parse)
            with api_errors.malformed_answers():
                self._handler.on_list(page.items)
            # Last: a watch that continues from a list that could not be read would vouch for half of it.
            self.resource_version = page.resource_version
        began = asyncio.get_running_loop().time()
        events = await self._watch()
        useful = events > 0 or asyncio.get_running_loop().time() - began > MIN_WATCH_S
        self._empty_watches = 0 if useful else self._empty_watches + 1
        if self._empty_watches >= MAX_EMPTY_WATCHES:
            self.resource_version, self._empty_watches = "", 0
        return useful

    async def _watch(self) -> int:
        seconds = random.randint(WATCH_TIMEOUT_S * 3 // 4, WATCH_TIMEOUT_S)  # noqa: S311  # spreads load, guards nothing
        query = {
            **self._query,
            "resourceVersion": self.resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        events = 0
        async with self._cluster.watch(self._path, query, idle_timeout_s=IDLE_TIMEOUT_S) as stream:
            self._handler.on_connected()
            try:
                async for event in stream:
                    self._handle_event(event)
                    events += 1
            finally:
                self._handler.on_watch_ended()
        return events

    @api_errors.malformed_answers()
    def _handle_event(self, event: Mapping[str, JSON]) -> None:
        obj = event["object"]
        if event["type"] == "ERROR":
            raise api_errors.parse_watch_error(obj)
        version = api_errors.require_text(obj["metadata"]["resourceVersion"])
        if event["type"] != "BOOKMARK":
            self._handler.on_event(event["type"], obj)
        # A bookmark moves the version too: that of a quiet list would expire.  An event that could not be
        # read does not: the next watch would never send it again.
        self.resource_version = version
