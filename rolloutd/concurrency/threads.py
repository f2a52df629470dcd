"""Threads for calls that block, in one pool for each class of work: what hangs delays only its own class.

The loop's default pool is not used by rolloutd: it is left to the loop, which looks up host names in it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SWITCH_INTERVAL_S = 0.001
"""How long a computing thread may delay the loop after each call of the system; the default is 5 ms."""


class ThreadPool:
    """At most `size` threads for one class of work; a thread starts when it is needed."""

    def __init__(self, name: str, size: int) -> None:
        self._executor = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns; a cancelled caller leaves the function running."""
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


ACCOUNTS = ThreadPool("accounts", 4)
"""Users and groups: a name service such as LDAP may not answer for minutes."""

BUCKET = ThreadPool("bucket", 4)
"""Directories that are stored in S3 or fetched: a server may be slow for minutes."""

COMPUTATIONS = ThreadPool("computations", 2)
"""Long computations; more threads would only share Python's one processor."""

DATABASE = ThreadPool("database", 4)
"""Connections to the store, and its comparisons with the audit, each of which may take minutes."""

FILES = ThreadPool("files", 6)
"""Playbook trees, artifacts, keys and settings: large trees take minutes."""

MATCHING = ThreadPool("matching", 4)
"""Patterns of checks, matched with what servers and nodes answer."""

NOTIFICATIONS = ThreadPool("notifications", 2)
"""Messages to people, over networks that may not answer."""

PROCESSES = ThreadPool("processes", 2)

RUNS = ThreadPool("runs", 6)
"""Directories and events of playbook runs."""
