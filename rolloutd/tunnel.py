"""A socket here that leads to a daemon's socket on another machine, over ssh.

`python -m rolloutd.tunnel HOST REMOTE_SOCKET LOCAL_SOCKET` prints `ready` once
it listens and ends when its standard input does.  sshd opens the socket there
as the account that was logged in to, so that is who the daemon sees.  Keys,
known hosts and aliases are those of the user's own ssh configuration.
"""

from __future__ import annotations

import asyncio
import sys

import asyncssh

CONNECT_LIMIT_S = 30.0
"""Reaching a host and logging in; a person waits no longer."""

KEEPALIVE_S = 15.0
KEEPALIVES = 3
"""A connection that answers nothing for so many times so long is lost, and said to be."""


def main(words: list[str]) -> int:
    """Be the tunnel; return the exit code."""
    host, there, here = words
    try:
        return asyncio.run(_tunnel(host, there, here))
    except (OSError, asyncssh.Error, TimeoutError) as error:
        print(f"{host}: {error or 'no answer in time'}", file=sys.stderr)  # noqa: T201
        return 1


async def _tunnel(host: str, there: str, here: str) -> int:
    async with asyncio.timeout(CONNECT_LIMIT_S):
        connection = await asyncssh.connect(
            **_place(host), keepalive_interval=KEEPALIVE_S, keepalive_count_max=KEEPALIVES
        )
    async with connection:
        listener = await connection.forward_local_path(here, there)
        print("ready", flush=True)  # noqa: T201
        lost = asyncio.create_task(connection.wait_closed())
        told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait({lost, told}, return_when=asyncio.FIRST_COMPLETED)
        listener.close()
        lost.cancel()
    return 0


def _place(host: str) -> dict[str, str | int]:
    user, _, rest = host.rpartition("@")
    name, colon, port = rest.rpartition(":")
    place: dict[str, str | int] = {"host": name if colon and port.isdecimal() else rest}
    if colon and port.isdecimal():
        place["port"] = int(port)
    if user:
        place["username"] = user
    return place


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
