"""What the daemon knows now, and the one way to change it.

The index holds the facts decisions are made from; the store holds the same
facts for ever.  Every change goes through `State.commit`: judged by the
invariants, written, applied, published, in this order and one at a time, so
that nobody decides on facts that are already older than what is written.
It knows no socket, no adapter and no driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from machines.events import Actor, Event, StepRecord
from machines.invariants import violation
from machines.projection import Projection
from machines.rollout import DAEMON, Reason
from rolloutd.errors import NotFound, StoreFailed, TenureLost
from rolloutd.ports import JSON, Clock, Entry, Host, Store
from rolloutd.settings import Settings
from rolloutd.state.feed import Feed
from rolloutd.state.fleet import Fleet, fleet_of
from rolloutd.state.telling import tell


class Committing(Protocol):
    """Commits events with their cause; `at` is when they were decided, if that took any time."""

    def __call__(
        self, events: Sequence[Event], cause: str, at: float | None = None
    ) -> Awaitable[tuple[Entry, ...]]: ...


class InvariantBroken(StoreFailed):
    """A change was refused because it would break what must never happen; nothing was written."""


FENCE_NAME_LENGTH = 16
"""Hexadecimal digits by which a node tells two databases apart."""


@dataclass(slots=True)
class Live:
    """What a node in flight is doing this moment; never stored."""

    step: str = ""
    percent: float = 0.0
    task: str = ""
    since: float = 0.0
    waits: StepRecord | None = None
    """Since when and for what it waits to be isolated, as far as was asked."""
    red: str = ""
    """What the check of this step said that is asked again until `red_until`."""
    red_until: float = 0.0


@dataclass(slots=True)
class SourceState:
    """How the last refresh of an inventory source went."""

    source: str
    refreshed_at: float | None = None
    nodes: int = 0
    error: str = ""
    failing_since: float | None = None


@dataclass(slots=True)
class State:
    """The facts of this daemon, shared by its loop, its drivers and its handlers."""

    index: Projection
    store: Store
    clock: Clock
    settings: Settings
    feed: Feed
    connections: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    live: dict[tuple[str, str], Live] = field(default_factory=dict)
    sources: dict[str, SourceState] = field(default_factory=dict)
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    trouble: str = ""
    lasting: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    poke: Callable[[], None] = lambda: None
    committed: Callable[[Sequence[Event], float], None] = lambda events, commit_s: None
    refreshed: asyncio.Event = field(default_factory=asyncio.Event)
    submitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    deposed: asyncio.Event = field(default_factory=asyncio.Event)
    _fleet: Fleet | None = None
    _generation: int = 0
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return self.clock.now()

    def host(self, node: str) -> Host:
        """Return a node and how to reach it; raises NotFound for one that the inventory no longer has."""
        known = self.index.nodes.get(node)
        if known is None:
            raise NotFound(f"the inventory no longer has {node}")
        return Host(node, known.kind, known.labels, self.connections.get(node, {}))

    def connect(self, connections: Mapping[str, Mapping[str, JSON]], gone: Iterable[str] = ()) -> None:
        """Take up how nodes are reached; those that are gone are reached no more."""
        lost = [name for name in gone if self.connections.pop(name, None) is not None]
        if lost or any(self.connections.get(name) != each for name, each in connections.items()):
            self.connections.update(connections)
            self._fleet = None

    def fleet(self) -> Fleet:
        """Return how all nodes are reached, and their groups, as last told: one value until that changes."""
        if self._fleet is None:
            self._generation += 1
            self._fleet = fleet_of(self.connections, self._generation)
        return self._fleet

    async def token(self) -> str:
        """Return what a run shows the fence: two numbers that only grow, whose they are, the second it is.

        Whose they are is the database's, known by the hash of its first audit entry.
        """
        first = await self.store.audit(limit=1)
        whose = first[0].hash[:FENCE_NAME_LENGTH] if first else "unnamed"
        return f"{self.epoch}.{self.feed.latest} {whose} {int(self.now())}"

    def troubles(self) -> tuple[str, ...]:
        """Return what hinders the daemon: what a person must see to first, then what the last write met.

        `lasting` holds what only a person or a restart can end, by its subject.
        """
        return (*self.lasting.values(), *filter(None, (self.trouble,)))

    async def commit(
        self, events: Sequence[Event], *, actor: Actor = DAEMON, cause: str
    ) -> tuple[Entry, ...]:
        """Write and apply the events, all or none.

        Raises InvariantBroken, Conflict or StoreFailed; then nothing has changed.
        """
        async with self._writing:
            return await self._commit(events, actor, cause)

    @asynccontextmanager
    async def deciding(self, actor: Actor = DAEMON) -> AsyncIterator[Committing]:
        """Hold all other changes back while something is decided and written.

        Yields a function that commits on behalf of the actor.
        """
        async with self._writing:
            yield lambda events, cause, at=None: self._commit(events, actor, cause, at)

    async def _commit(
        self, events: Sequence[Event], actor: Actor, cause: str, at: float | None = None
    ) -> tuple[Entry, ...]:
        if not events:
            return ()
        now = self.now() if at is None else at
        for number, event in enumerate(events):
            broken = violation(self.index, event, now, events[:number])
            if broken is not None:
                raise InvariantBroken(broken)
        writing = asyncio.create_task(self._write(events, actor, cause, now))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The write goes on without us, and nobody else writes meanwhile.  What becomes of it, a failure
            # too, must not take the place of the cancellation: whoever was to end would go on.
            await _ended(writing)
            raise

    async def _write(
        self, events: Sequence[Event], actor: Actor, cause: str, now: float
    ) -> tuple[Entry, ...]:
        """Write the events and let them be known; what is written is known, whoever still waits for it."""
        began = asyncio.get_running_loop().time()
        try:
            entries = await self.store.commit(events, actor=actor, cause=cause, at=now)
        except TenureLost:
            self.deposed.set()
            raise
        self.trouble = ""
        self.committed(events, asyncio.get_running_loop().time() - began)
        self._applied(events, entries, actor, cause)
        return entries

    def _applied(self, events: Sequence[Event], entries: tuple[Entry, ...], actor: Actor, cause: str) -> None:
        for event in events:
            self.index.apply(event)
        self.feed.committed(entries)
        tell(events, actor, cause)
        self.poke()


async def _ended(writing: asyncio.Task[tuple[Entry, ...]]) -> None:
    """Wait for the end of a write, however often the wait for it is cancelled."""
    while not writing.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((writing,))
    if not writing.cancelled():
        writing.exception()  # seen: nobody else asks for it any more
