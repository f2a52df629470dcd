"""The beginning of a stream that another system sends; it may never end."""

from __future__ import annotations

from typing import Protocol


class ByteStream(Protocol):
    """The streams of asyncio and of aiohttp."""

    async def read(self, n: int, /) -> bytes: ...


async def read_start(stream: ByteStream, limit: int) -> bytes:
    """Return the first `limit` bytes, all of them if the stream is shorter; the rest stays unread."""
    start = bytearray()
    while len(start) < limit and (part := await stream.read(limit - len(start))):
        start += part
    return bytes(start)
