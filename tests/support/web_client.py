"""A client that requests all the time over connections that it keeps, and never retries.

Each connection sends its next request soon after the answer to the last one.  A failure is an answer that is
not whole and right, or none; its connection is opened again for the next request.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from threading import Thread
from types import TracebackType

FAST_CONNECTIONS, SLOW_CONNECTIONS = 30, 15
"""Connections that ask for `/` and for `/slow`: several hundred requests a second, and one 10-second response
or more on each of a dozen servers at all times.
"""

PAUSE_S = 0.05
"""Pause of a connection between an answer and its next request."""

MAX_FAILURES = 1000
"""Failures that are kept: enough to judge."""

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nokay"


class WebClient:
    """Requests from a thread of its own while the context is open; `failures` are (instant, text)."""

    def __init__(self, port: int, *, fast: int = FAST_CONNECTIONS, slow: int = SLOW_CONNECTIONS) -> None:
        self._port = port
        self._paths = ["/"] * fast + ["/slow"] * slow
        self._stopping = False
        self._thread = Thread(target=lambda: asyncio.run(self._run()), name="web client")
        self.answered = {"/": 0, "/slow": 0}
        self.failures: list[tuple[float, str]] = []
        self.began_at = time.monotonic()

    @property
    def rate(self) -> float:
        """Answers per second so far."""
        return sum(self.answered.values()) / (time.monotonic() - self.began_at)

    def __enter__(self) -> WebClient:
        self.began_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for path in self._paths:
                tasks.create_task(self._request_repeatedly(path))

    async def _request_repeatedly(self, path: str) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        request = f"GET {path} HTTP/1.1\r\nHost: web\r\n\r\n".encode()
        while not self._stopping:
            answer = b""
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", self._port)
                streams[1].write(request)
                answer = await streams[0].readuntil(b"\r\n\r\n")
                answer += await streams[0].readexactly(4)
            except (OSError, asyncio.IncompleteReadError) as error:
                answer += f" [{type(error).__name__}]".encode()
            if answer == WHOLE:
                self.answered[path] += 1
            else:
                self.failures = [*self.failures, (time.time(), f"{path}: {answer!r:.200}")][-MAX_FAILURES:]
                if streams is not None:
                    streams[1].close()
                streams = None
            await asyncio.sleep(PAUSE_S)
        if streams is not None:
            streams[1].close()
            with suppress(OSError):
                await streams[1].wait_closed()
