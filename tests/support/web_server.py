"""A small HTTP server, for nodes behind a balancer: `python web_server.py PORT PIDFILE`.

`/` answers at once; `/slow` sends its head at once and the rest of its body after SLOW_S, so that a server
that is stopped in between cuts the response.  Connections are kept alive.  It imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

BIND_RETRY_S = 0.1

SLOW_S = 10.0


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\no")
            if request.startswith(b"GET /slow "):
                await writer.drain()
                await asyncio.sleep(SLOW_S)
            writer.write(b"kay")
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass  # the balancer closed the connection
    finally:
        writer.close()


async def main(port: int, pid_file: Path) -> None:
    server = None
    while server is None:
        try:
            server = await asyncio.start_server(serve_connection, "127.0.0.1", port, reuse_address=True)
        except OSError:  # a connection of another test has the port for a moment
            await asyncio.sleep(BIND_RETRY_S)
    pid_file.write_text(str(os.getpid()))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
