"""An event loop in which no time passes but by timers, for daemons that run for days within seconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """What runs in threads elsewhere runs inline."""

    def __init__(self) -> None:
        super().__init__(_NoWait(self))
        self.virtual_s = 0.0

    def time(self) -> float:
        return getattr(self, "virtual_s", 0.0)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        done = self.create_future()
        done.set_result(func(*args))
        return done


class _NoWait(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self._loop.virtual_s += timeout
        return super().select(0)
