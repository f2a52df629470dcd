"""The requests that the model wants, each sent when it is due.

A request that a user waits for is sent at once.  Other requests are repeated
less often the longer their responses take, and wait for the answer to a key.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rolloutd.control.client import Client, api_path
from rolloutd.control.nodes import wire_nodes
from tui.connection.streams import Response
from tui.state.model import FetchRequest, Model
from tui.state.values import NodesSnapshot, parse_nodes

HTTP_NOT_FOUND, HTTP_TOO_MANY_REQUESTS, HTTP_SERVER_ERROR = 404, 429, 500

MIN_INTERVAL_S: Mapping[str, float] = {
    # The cost decides: a small fleet's status takes milliseconds, and a user sees an event at once.
    "status": 0.05,
    "nodes": 2.0,
    "changed-nodes": 0.2,
    "locks": 1.0,
    "closed": 2.0,
    "rollout": 1.0,
    "plan": 1.0,
    "review": 1.0,
}
"""Between a response and the next request of the same kind."""

URGENT_INTERVAL_S = 0.1
"""The same where a user waits."""

COST_FACTOR = 20
"""Pause after slow work, in multiples of its duration: it uses 5 % of a core at most."""

STATUS_COST_FACTOR = 10
"""The same after a status, which has most figures on the screen."""

MAX_STATUS_PAUSE_S = 0.5
"""Longest pause after a status.  Its duration includes the daemon's pause between answers that consoles
share, up to 0.2 s, and an event must be on the screen within a second."""

NODES_PER_PAGE = 1_000
"""Decoding a page holds the interpreter for some milliseconds, and the console answers no key meanwhile."""

SHARED_ENTRIES = 512
"""Changed nodes are requested after a multiple of so many entries, so that consoles share an answer."""

MAX_COMPLETED = 256
"""Requests whose completion is remembered, more than one console shows."""

ANSWER_S = 0.08
"""Reserved after a key: enough to draw a page of the largest fleet."""

MAX_DELAY_S = 0.25
"""The longest delay of other work while a key is held down."""

Fetch = Callable[[], Awaitable[float]]
"""Sends a request, applies its response, and returns the seconds until it may be sent again."""

CallDaemon = Callable[[Callable[[], Any]], Awaitable[Response[Any]]]


class FetchQueue:
    """Sends the model's requests and applies their responses."""

    def __init__(
        self,
        model: Model,
        client: Client,
        call_daemon: CallDaemon,
        now: Callable[[], float],
        key_delay: Callable[[], float],
    ) -> None:
        self._model = model
        self._client = client
        self._call_daemon = call_daemon
        self._now = now
        self._key_delay = key_delay
        self._in_flight: set[tuple[str, str]] = set()
        self._completed: dict[tuple[str, str], tuple[float, float]] = {}

    def due_fetches(self) -> Iterator[Fetch]:
        """Yield a coroutine function for each request that is due."""
        now = time.monotonic()
        for key, request in list(self._model.fetch_requests.items()):
            completed_at, took = self._completed.get(key, (0.0, 0.0))
            pause = URGENT_INTERVAL_S if request.is_urgent else _pause(request.resource, took)
            if key not in self._in_flight and now - completed_at >= pause:
                del self._model.fetch_requests[key]
                self._in_flight.add(key)
                yield partial(self._fetch, key, request)

    async def _fetch(self, key: tuple[str, str], request: FetchRequest) -> float:
        began = time.monotonic()
        read, apply = self._endpoint(request)
        response = await self._call_daemon(read)
        self._in_flight.discard(key)
        # Removed and added again, so that the first key of the dict is the oldest.
        self._completed.pop(key, None)
        took = time.monotonic() - began
        self._completed[key] = (time.monotonic(), took)
        if len(self._completed) > MAX_COMPLETED:
            del self._completed[next(iter(self._completed))]
        if response.result is not None:
            apply(response.result)
        elif response.unreachable is not None:
            # An event may have requested it again meanwhile, and more urgently.
            self._model.fetch_requests.setdefault(key, request)
        elif response.error is not None:
            self._handle_error(key, request, response.error.status)
        return _pause(request.resource, took)

    def _handle_error(self, key: tuple[str, str], request: FetchRequest, status: int) -> None:
        if status == HTTP_NOT_FOUND:
            self._model.rollouts.pop(request.rollout, None)
            self._model.missing_rollouts.add(request.rollout)
        elif status == HTTP_TOO_MANY_REQUESTS or status >= HTTP_SERVER_ERROR:
            # No event may announce the figure again.  Not urgent, because the daemon has trouble already.
            self._model.fetch_requests.setdefault(key, replace(request, is_urgent=False))

    def _endpoint(self, request: FetchRequest) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Return how a resource is read, in a thread, and how its response is applied."""
        model, rollout = self._model, request.rollout
        known = model.rollouts.get(rollout)
        match request.resource:
            case "status":
                return self._get("status"), partial(model.apply_status, at=self._now())
            case "locks":
                return self._get("locks"), model.apply_locks
            case "closed":
                return self._get("rollouts"), model.apply_closed_rollouts
            case "nodes":
                return partial(self._fetch_nodes, rollout), partial(model.apply_nodes, rollout)
            case "changed-nodes":
                after = model.seq if known is None else known.nodes_seq
                read = partial(self._fetch_nodes, rollout, after - after % SHARED_ENTRIES)
                return read, partial(model.apply_nodes, rollout, is_whole=False)
            case "plan":
                return self._get("rollouts", rollout, "plan"), partial(model.apply_plan, rollout)
            case "review":
                return self._get("rollouts", rollout, "review"), partial(model.apply_review, rollout)
            case _:
                # The response has no sequence number; it is at least as new as what the model knows now.
                return self._get("rollouts", rollout), partial(model.apply_rollout, seq=model.seq)

    def _get(self, *parts: str) -> Callable[[], Any]:
        return partial(self._client.get, api_path(*parts))

    def _fetch_nodes(self, rollout: str, changed_after: int | None = None) -> NodesSnapshot:
        """Fetch and parse nodes in the request's thread, so that drawing continues."""
        return parse_nodes(self._node_pages(rollout, changed_after), self._key_delay)

    def _node_pages(self, rollout: str, changed_after: int | None) -> Iterator[wire_nodes.Nodes]:
        after: str | None = None
        while True:
            query = {"limit": NODES_PER_PAGE, "after": after, "changed_after": changed_after}
            page: wire_nodes.Nodes = self._client.get(api_path("rollouts", rollout, "nodes"), query)
            yield page
            after = page["next"]
            if after is None:
                return


def _pause(resource: str, took: float) -> float:
    """Return the seconds between a response that took so long and the next request of its kind."""
    if resource == "status":
        return max(MIN_INTERVAL_S[resource], min(took * STATUS_COST_FACTOR, MAX_STATUS_PAUSE_S))
    return max(MIN_INTERVAL_S[resource], took * COST_FACTOR)


class KeyPriority:
    """Delays the work that no user waits for until a key has been answered."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._last = float("-inf")

    def key_pressed(self) -> None:
        now = self._now()
        if now - self._last > ANSWER_S:
            self._began = now
        self._last = now

    def delay(self) -> float:
        """Return the seconds for which other work should wait."""
        return max(0.0, min(self._last + ANSWER_S, self._began + MAX_DELAY_S) - self._now())

    def since_key(self) -> float:
        return self._now() - self._last
