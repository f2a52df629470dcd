"""Keeps a listener true to one list of the API server: list, then watch from its version, for ever.

Whatever ends a watch (its time, a lost connection, a version too old, a server
restored from a backup) leads back into the loop; the listener is told when
nothing can be seen and when it can be seen again.  What the objects are is not
known here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable, read_watch_error
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster

JSON = Any

WATCH_S = 240
"""Asked of the server for one watch: it ends by itself, so that watches move to new servers."""

IDLE_S = 150.0
"""A watch silent for so long is opened anew: the server sends a bookmark about every minute."""

AT_ONCE_S = 1.0
"""A watch that ends sooner, without an event, is not asked again at once."""

EMPTY_ENDS = 3
"""So many such ends in a row mean that the server does not know our version: list again."""

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 20.0
"""Between two tries: a cluster that is back is seen again within one of them."""


class Listener(Protocol):
    """Whoever wants to know."""

    def listed(self, objects: Sequence[Mapping[str, JSON]]) -> None:
        """Take this whole list in the place of all that was known."""
        ...

    def told(self, kind: str, thing: Mapping[str, JSON]) -> None:
        """Take one object that was ADDED, MODIFIED or DELETED."""
        ...

    def seeing(self) -> None:
        """Know that the watch is open: what is known is true from now on."""
        ...

    def ended(self) -> None:
        """Know that the watch is open no more: what happens from now on is told by the next one."""
        ...

    def blind(self, why: str) -> None:
        """Know that nothing can be seen now."""
        ...


async def follow(cluster: Cluster, path: str, query: Mapping[str, str], listener: Listener) -> None:
    """Tell the listener all that happens to a list, until cancelled."""
    backoff = Backoff(FIRST_WAIT_S, MOST_WAIT_S)
    watch = _Watch(cluster, path, query, listener)
    while True:
        try:
            rested = await watch.once()
        except ApiError as error:
            if error.status == 410:
                watch.version = ""
            else:
                listener.blind(f"cluster {cluster.name} refused to be watched: {error}")
            rested = False
        except ClusterUnreachable as error:
            listener.blind(str(error))
            rested = False
        if rested:
            backoff.reset()
        else:
            await asyncio.sleep(backoff.next_s())


class _Watch:
    def __init__(self, cluster: Cluster, path: str, query: Mapping[str, str], listener: Listener) -> None:
        self._cluster = cluster
        self._path = path
        self._query = dict(query)
        self._listener = listener
        self._empty_ends = 0
        self.version = ""

    async def once(self) -> bool:
        """List if need be, and watch until the watch ends; say whether it was of use."""
        if not self.version:
            page = await self._cluster.list(self._path, self._query)
            self.version = page.version
            self._listener.listed(page.items)
        began = asyncio.get_running_loop().time()
        events = await self._watch()
        useful = events > 0 or asyncio.get_running_loop().time() - began > AT_ONCE_S
        self._empty_ends = 0 if useful else self._empty_ends + 1
        if self._empty_ends >= EMPTY_ENDS:
            self.version, self._empty_ends = "", 0
        return useful

    async def _watch(self) -> int:
        seconds = random.randint(WATCH_S * 3 // 4, WATCH_S)  # noqa: S311  # spreads load, guards nothing
        query = {
            **self._query,
            "resourceVersion": self.version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        events = 0
        async with self._cluster.watch(self._path, query, idle_s=IDLE_S) as stream:
            self._listener.seeing()
            try:
                async for event in stream:
                    self._take(event)
                    events += 1
            finally:
                self._listener.ended()
        return events

    def _take(self, event: Mapping[str, JSON]) -> None:
        thing = event["object"]
        if event["type"] == "ERROR":
            raise read_watch_error(thing)
        self.version = thing["metadata"]["resourceVersion"]
        if event["type"] != "BOOKMARK":
            self._listener.told(event["type"], thing)
