"""Waiting for a condition, within a limit that no loaded machine needs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 90.0

POLL_S = 0.02


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Return what the condition gives once that is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain until {what or condition}"
        time.sleep(POLL_S)
    return found


async def wait_in_loop_until(condition: Callable[[], Any]) -> Any:
    """Return what the condition, plain or async, gives once that is true, without blocking the loop."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(POLL_S)
