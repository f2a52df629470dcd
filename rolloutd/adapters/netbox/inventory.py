"""Inventory source `netbox`: devices and virtual machines of NetBox.

Every refresh checks the token and the names of the settings first, reads each list whole and compares it
with the server's count; anything less fails the refresh, and the last good nodes stay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolloutd.adapters.netbox.objects import Mapper, NetboxObject
from rolloutd.errors import SourceFailed
from rolloutd.ports import JSON, DiscoveredNode

if TYPE_CHECKING:
    from rolloutd.adapters.netbox.http import TimeLimits
    from rolloutd.adapters.netbox.reader import Reader

MAX_HINTS = 100
"""Changed objects that are read one by one; if there are more, the lists are read."""

MAX_PARTIAL_READS = 300
"""Refreshes that read changed objects alone, one after another: five minutes of constant messages.

NetBox sends no message for many changes; only a whole read finds those.
"""

Hint = tuple[str, int]
"""A kind and an id of an object that may have changed."""


class NetboxInventory:
    """ports.Inventory and ports.SupportsPreflight of one NetBox.

    Requests block, so each refresh runs in a thread of its own, at most one at a time.
    """

    def __init__(self, params: Mapping[str, JSON], *, limits: TimeLimits | None = None) -> None:
        self.source = f"netbox/{params['name']}"
        self._url = params["url"]
        self._token_file = Path(params["token_file"])
        self._ca_file = Path(params["ca_file"]) if "ca_file" in params else None
        self._kinds: Sequence[str] = params["objects"]
        self._filters: Mapping[str, JSON] = params["filter"]
        self._limits = limits
        self._mapper = Mapper(self.source, params["labels"], params["address"], params.get("provider_id"))
        self.left_out: Mapping[str, str] = {}
        self._is_reading = False
        self._partial_reads = 0
        self._objects: dict[Hint, NetboxObject] = {}
        self._hints: set[Hint] | None = set()

    def add_hint(self, hint: Hint | None) -> None:
        """Remember that an object may have changed; None means that any may have.

        The next refresh reads only such objects.
        """
        if self._hints is not None:
            self._hints = None if hint is None or len(self._hints) >= MAX_HINTS else {*self._hints, hint}

    async def refresh(self) -> Sequence[DiscoveredNode]:
        """Return all nodes; raises SourceFailed."""
        hints, self._hints = self._hints, set()
        try:
            objects = await self._run_in_thread(lambda: self._read(hints or set()))
            nodes = self._to_nodes(objects.values())
        except BaseException:
            self._hints = None  # the failed read may have missed any change
            raise
        self._objects = objects
        return nodes

    async def find_missing_prerequisites(self) -> Sequence[str]:
        try:
            problems: Sequence[str] = await self._run_in_thread(self._find_problems)
        except SourceFailed as error:
            return [str(error)]
        return problems

    @contextmanager
    def _open_reader(self) -> Iterator[Reader]:
        """Yield a reader for one refresh; what is done with it blocks."""
        # Imported here: only a daemon that uses the source loads the HTTP libraries.
        from rolloutd.adapters.netbox.http import NetboxSession, TimeLimits
        from rolloutd.adapters.netbox.reader import Reader

        session = NetboxSession(
            self.source, self._url, self._token_file, self._ca_file, self._limits or TimeLimits()
        )
        try:
            yield Reader(session, self._kinds, self._filters, self._mapper)
        finally:
            session.close()

    def _find_problems(self) -> Sequence[str]:
        """Return what the token lacks and what it has too much, after a whole read if it lacks nothing."""
        with self._open_reader() as reader:
            reader.check_token()
            missing = reader.find_missing_rights()
            if not missing:
                reader.check()
                reader.read_all()
            return [*missing, *reader.find_excess_rights()]

    def _read(self, hints: set[Hint]) -> dict[Hint, NetboxObject]:
        """Return the objects by kind and id; blocks."""
        with self._open_reader() as reader:
            reader.check()
            if hints and self._objects and self._partial_reads < MAX_PARTIAL_READS:
                changed = reader.read_some(hints)
                # A node that is missing may have lost its filter's value, or the token its rights.  An object
                # outside of the filter is no news.
                if not (hints - changed.keys()) & self._objects.keys():
                    self._partial_reads += 1
                    return {**self._objects, **changed}
            self._partial_reads = 0
            return reader.read_all()

    def _to_nodes(self, objects: Iterable[NetboxObject]) -> Sequence[DiscoveredNode]:
        nodes, self.left_out = self._mapper.to_nodes(objects)
        return sorted(nodes, key=lambda node: (node.name, node.id))

    async def _run_in_thread(self, read: Callable[[], Any]) -> Any:
        """Run in a daemon thread: a server that hangs must not delay the end of rolloutd."""
        if self._is_reading:
            raise SourceFailed(f"{self.source}: the read before has not ended; check the server")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            result: Any = None
            failure: Exception | None = None
            try:
                result = read()
            except Exception as error:  # noqa: BLE001 - the guard around the adapter reports it
                failure = error
            self._is_reading = False
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, future, result, failure)

        self._is_reading = True
        # Not asyncio's pool, whose threads the interpreter waits for at its end.
        threading.Thread(target=run, name=self.source, daemon=True).start()
        return await future


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
