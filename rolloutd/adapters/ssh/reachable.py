"""Observer and check `reachable`: the node answers over ssh.

The observer reads only the ssh banner, without a login, so it can observe a pool's peers every minute.  The
check logs in and runs `true`, because a node must be usable before it returns to service.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence

from machines.model.node import NodeHealth, Observation
from rolloutd import ports
from rolloutd.adapters.ssh.login_errors import is_connection_refused
from rolloutd.adapters.ssh.route import Route, read_route
from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.errors import HostKeyChanged, NodeUnreachable

OBSERVE_TIMEOUT_S = 5.0
"""A live sshd sends its banner within milliseconds; a second TCP SYN goes out after one second."""

MAX_CONCURRENT_OBSERVATIONS = 64
"""Sockets open at once: enough for a pool, and few file descriptors."""

LOGIN_TIMEOUT_S = 15.0
"""Limit of one login and `true`; during a reboot the caller retries until the step's deadline."""

BANNER_BYTES = 4096
"""sshd may send lines before its version (RFC 4253, 4.2), but not more than this."""

_LOCAL_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of this machine, which do not show the node's state."""


def make_observer(context: ports.AdapterContext) -> ports.Observer:
    ssh = context.settings.ssh
    return ReachableObserver(
        context.shell, context.clock, ports.ConnectionDefaults(ssh.known_hosts, ssh.user, ssh.key_file)
    )


class ReachableCheck(ShellAdapter):
    """ports.Check by one new ssh login and `true`."""

    async def check(self, ctx: ports.StepContext) -> ports.Ok | ports.Failed | ports.Unknown:
        await self._shell.disconnect(ctx.host.name)  # a pooled connection would prove nothing
        try:
            result = await self._shell.run(ctx.host, "true", timeout_s=LOGIN_TIMEOUT_S)
        except HostKeyChanged as error:
            return ports.Failed(str(error))
        except (NodeUnreachable, TimeoutError) as error:
            return ports.Failed(f"not reachable: {error}")
        if result.exit_status != 0:
            return ports.Failed(
                f"{ctx.host.name} accepts the login, but `true` ends with {result.exit_status}",
                output=result.stderr,
            )
        return ports.Ok(f"{ctx.host.name} answers over ssh")


class ReachableObserver:
    """ports.Observer by the ssh banner over TCP, or by a login for nodes behind a jump host."""

    def __init__(
        self, shell: ports.Shell, clock: ports.Clock, defaults: ports.ConnectionDefaults | None = None
    ) -> None:
        self._shell = shell
        self._clock = clock
        self._defaults = defaults or ports.ConnectionDefaults()

    async def observe(self, hosts: Sequence[ports.Host]) -> Sequence[Observation]:
        slots = asyncio.Semaphore(MAX_CONCURRENT_OBSERVATIONS)

        async def observe_one(host: ports.Host) -> Observation:
            async with slots:
                sight, why = await self._observe_host(host)
            return Observation(node=host.name, sight=sight, at=self._clock.now(), why=why)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(observe_one(host)) for host in hosts]
        return [task.result() for task in tasks]

    async def _observe_host(self, host: ports.Host) -> tuple[NodeHealth, str]:
        try:
            route = read_route(host, self._defaults)
        except NodeUnreachable as error:
            return NodeHealth.UNKNOWN, str(error)
        if not route.is_direct:
            return await self._observe_by_login(host)
        try:
            async with asyncio.timeout(OBSERVE_TIMEOUT_S):
                return await _read_banner(route)
        except TimeoutError:
            return NodeHealth.DOWN, f"no ssh banner from {route.address} within {OBSERVE_TIMEOUT_S:g}s"

    async def _observe_by_login(self, host: ports.Host) -> tuple[NodeHealth, str]:
        try:
            await self._shell.run(host, "true", timeout_s=LOGIN_TIMEOUT_S)
        except (NodeUnreachable, TimeoutError) as error:
            return NodeHealth.DOWN, str(error)
        return NodeHealth.UP, "answers over ssh by its jump host"


async def _read_banner(route: Route) -> tuple[NodeHealth, str]:
    try:
        reader, writer = await asyncio.open_connection(route.host, route.port, limit=BANNER_BYTES)
    except socket.gaierror as error:
        return NodeHealth.UNKNOWN, f"the name {route.host} does not resolve: {error.strerror}"
    except OSError as error:
        if error.errno in _LOCAL_ERRNOS:
            return NodeHealth.UNKNOWN, f"this machine cannot connect to anything now: {error.strerror}"
        problem = "refused" if is_connection_refused(error) else f"failed: {error.strerror or error}"
        return NodeHealth.DOWN, f"tcp connect to {route.address} {problem}"
    try:
        return await _parse_banner(reader, route)
    finally:
        # A graceful close would wait for a node that may be down.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _parse_banner(reader: asyncio.StreamReader, route: Route) -> tuple[NodeHealth, str]:
    read = 0
    try:
        while read < BANNER_BYTES:
            line = await reader.readline()
            if line.startswith(b"SSH-"):
                return (
                    NodeHealth.UP,
                    f"{route.address} answers as {line.decode(errors='replace').strip()[:80]}",
                )
            if not line:
                return NodeHealth.DOWN, f"{route.address} closed the connection before the ssh banner"
            read += len(line)
    except (OSError, ValueError) as error:  # ValueError: a line longer than the limit
        return NodeHealth.DOWN, f"{route.address} broke off before the ssh banner: {error}"
    return NodeHealth.DOWN, f"{route.address} answers, but not as an ssh server"
