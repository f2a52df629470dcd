"""Something that is being done and can be ended in the middle by somebody else.

Whoever does it is told that it was ended, and goes by what is recorded of it;
a cancellation of the doer itself stays one.  It knows nothing of nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


class Interruptible:
    """One thing at a time that `stop` ends."""

    def __init__(self) -> None:
        self._doing: asyncio.Task[None] | None = None
        self._stopped = False

    def stop(self) -> None:
        """End what is being done; without anything to end, nothing."""
        if self._doing is not None and not self._stopped:
            self._stopped = True
            self._doing.cancel()

    async def run(self, acting: Coroutine[Any, Any, None], name: str) -> bool:
        """Do it; say whether it was done to its end."""
        self._doing = asyncio.create_task(acting, name=name)
        try:
            await self._doing
        except asyncio.CancelledError:
            ours = self._stopped and self._doing.cancelled()
            asking = asyncio.current_task()
            if not ours or (asking is not None and asking.cancelling()):
                await _ended(self._doing)
                raise
            return False
        finally:
            self._doing, self._stopped = None, False
        return True


@asynccontextmanager
async def beside(doing: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Do something beside the body; it is ended with it, and raises in it what it raised."""
    task = asyncio.create_task(doing)
    try:
        yield task
        if task.done():
            task.result()
    finally:
        await _ended(task)


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end, so that nothing of it outlives its parent."""
    task.cancel()
    await asyncio.wait((task,))
