"""What the contract suites of the ssh ports stand on: one real sshd, and contexts for steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from rolloutd.ports import Host, StepContext
from tests.contracts.fakes.clock import START
from tests.support.sshd import Sshd

LIMIT_S = 60.0
"""How long a test waits for what must happen, on a loaded machine."""


def step_context(
    host: Host, params: Mapping[str, Any], *, prior: Any = None, key: str = "r1/n1/1/step"
) -> StepContext:
    """Return a step's context; its deadline is far enough for a loaded machine."""
    return StepContext(
        host=host,
        rollout="r1",
        attempt=1,
        step="step",
        idempotency_key=key,
        params=params,
        deadline=START + LIMIT_S,
        prior=prior,
    )


def host_of(sshd: Sshd, name: str = "n1", **variables: Any) -> Host:
    """Return the node that an sshd is, reached without the machine's own ssh configuration."""
    arguments = f'-F /dev/null -o UserKnownHostsFile="{sshd.known_hosts}" -o GlobalKnownHostsFile=/dev/null'
    return Host(name, connection={**sshd.connection(), "ansible_ssh_common_args": arguments, **variables})


@contextmanager
def real_sshd(directory: Path) -> Iterator[Sshd]:
    """Run an sshd in a directory."""
    sshd = Sshd().start(directory)
    try:
        yield sshd
    finally:
        sshd.stop()


@asynccontextmanager
async def serve_connections(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Serve each connection to a loopback port; yield the port, and end them all in the end."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            writer.close()
        except OSError:
            pass  # the other side has gone
        except asyncio.CancelledError:
            writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
