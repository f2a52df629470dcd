"""Somebody's turn to look again: waits that end early when it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


class Turn:
    """A bell that cuts waits short, and is silent again once it was heard."""

    def __init__(self) -> None:
        self._come = asyncio.Event()

    def call(self) -> None:
        """End the wait that is under way, or the next one."""
        self._come.set()

    async def or_after(self, waiting: Awaitable[Any]) -> None:
        """Wait for the awaitable, but no longer than until somebody calls; raises what it raises."""
        called = asyncio.ensure_future(self._come.wait())
        waited = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({called, waited}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            called.cancel()
            waited.cancel()
        self._come.clear()
        if waited.done() and not waited.cancelled():
            waited.result()
