"""Executors: where the store's synchronous SQL runs.

An executor is the only user of its connection.  The daemon uses aiosqlite's thread; a simulation under
virtual time runs the SQL inline, because a thread runs in real time.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import aiosqlite

T = TypeVar("T")

ConnectionFactory = Callable[[], sqlite3.Connection]


class Executor(Protocol):
    """One connection that runs one piece of work at a time."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work` on the connection; cancelling the caller does not stop it."""
        ...

    async def close(self) -> None:
        """Finish the work that was submitted, then close the connection."""
        ...


class ThreadExecutor(aiosqlite.Connection):
    """aiosqlite's connection with one more method, which runs a whole function in its thread.

    aiosqlite's public methods switch threads once per statement, five times for the smallest transaction, and
    another task's statement may run in between.  All of them use the protected `_execute`, so a subclass must
    use it too; the contract suite fails if aiosqlite removes it.
    """

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        # The lambda hides the arguments: aiosqlite's debug log prints them, and a batch may hold passwords.
        return cast(T, await self._execute(lambda: work(self._conn)))  # type: ignore[no-untyped-call]


class InlineExecutor:
    def __init__(self, connect: ConnectionFactory) -> None:
        self.connection = connect()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return work(self.connection)

    async def close(self) -> None:
        self.connection.close()


async def open_thread_executor(connect: ConnectionFactory) -> Executor:
    # Connect outside aiosqlite's thread: aiosqlite does not stop its thread when connecting fails there.
    connection = await asyncio.to_thread(connect)
    return cast(ThreadExecutor, await ThreadExecutor(lambda: connection, iter_chunk_size=1))


async def open_inline_executor(connect: ConnectionFactory) -> Executor:
    return InlineExecutor(connect)
