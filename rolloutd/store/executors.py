"""Where the store's synchronous SQL runs: in a thread of its own, or inline.

An executor is one connection and the only place that uses it.  In the daemon it is
aiosqlite's connection thread; in a simulation under virtual time, where a
thread would be an escape from the clock, it is the caller itself.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import aiosqlite

T = TypeVar("T")

Connect = Callable[[], sqlite3.Connection]


class Executor(Protocol):
    """One connection; work on it runs one piece after the other."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` makes of the connection; a cancelled caller does not stop it."""
        ...

    async def close(self) -> None:
        """Finish the work that was handed in, then close the connection."""
        ...


class ThreadExecutor(aiosqlite.Connection):
    """aiosqlite's connection with one more method: a whole function in one hop to its thread.

    aiosqlite's public methods hop once per statement, five hops for the
    smallest transaction, and between two hops another task's statement may slip
    into it.  Its own methods are all made of the protected `_execute`, which is
    what a subclass is left with; the contract suite fails should it ever go.
    """

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """See Executor."""
        # A closure, because aiosqlite logs what it executes with its arguments
        # when debugging, and a batch may hold how nodes are reached.
        return cast(T, await self._execute(lambda: work(self._conn)))  # type: ignore[no-untyped-call]


class InlineExecutor:
    """Runs the work at once, in the caller."""

    def __init__(self, connect: Connect) -> None:
        self.connection = connect()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """See Executor."""
        return work(self.connection)

    async def close(self) -> None:
        """See Executor."""
        self.connection.close()


async def open_thread(connect: Connect) -> Executor:
    """Open a connection in a thread of its own."""
    # Opened beforehand, because aiosqlite leaves its thread to itself when that
    # fails, and the thread then stumbles over a loop that may be gone.
    connection = await asyncio.to_thread(connect)
    return cast(ThreadExecutor, await ThreadExecutor(lambda: connection, iter_chunk_size=1))


async def open_inline(connect: Connect) -> Executor:
    """Open a connection that is used in place."""
    return InlineExecutor(connect)
