"""Whether a node answers over ssh: a cheap look for many nodes, a real login for one.

The observer asks only for the ssh banner: no key is used and nothing is logged
in, so a pool's mates can be looked at every minute.  The check logs in and runs
`true`: a node that is to be put back must be one that can be worked on.  What
follows from the answers is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence

from machines.node import Observation, Sight
from rolloutd.adapters.kit import Kit
from rolloutd.adapters.ssh.explain import refused
from rolloutd.adapters.ssh.route import Defaults, Route, read_route
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import Clock, Failed, Host, Observer, Ok, Shell, StepContext, Unknown

OBSERVE_TIMEOUT_S = 5.0
"""A live sshd sends its banner within milliseconds; a second TCP SYN goes out after one second."""

OBSERVED_AT_ONCE = 64
"""Sockets opened at once: a pool is looked at in one go, and file descriptors stay few."""

LOGIN_TIMEOUT_S = 15.0
"""For one login and `true`; whoever waits for a reboot asks again until the step's deadline."""

BANNER_BYTES = 4096
"""sshd may send lines before its version (RFC 4253, 4.2); more than this is no sshd."""

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of this machine, which say nothing of the node."""


def make_observer(kit: Kit) -> Observer:
    """Return the observer `reachable` of the settings."""
    ssh = kit.settings.ssh
    return ReachableObserver(kit.shell, kit.clock, Defaults(ssh.known_hosts, ssh.user, ssh.key_file))


def make_check(kit: Kit) -> ReachableCheck:
    """Return the check `reachable`."""
    return ReachableCheck(kit.shell)


class ReachableCheck:
    """ports.Check: one fresh ssh login and `true`.

    The parameter `within` is how long the caller keeps asking; one call asks once.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Log in anew and run `true`."""
        await self._shell.forget(ctx.host.name)  # a pooled connection would prove nothing
        try:
            result = await self._shell.run(ctx.host, "true", timeout_s=LOGIN_TIMEOUT_S)
        except HostKeyChanged as error:
            return Failed(str(error))
        except (NodeUnreachable, TimeoutError) as error:
            return Failed(f"not reachable: {error}")
        if result.exit_status != 0:
            return Failed(
                f"{ctx.host.name} lets us in, but `true` ends with {result.exit_status}", output=result.stderr
            )
        return Ok(f"{ctx.host.name} answers over ssh")


class ReachableObserver:
    """ports.Observer by TCP and the ssh banner; nodes behind a jump host are asked for a login."""

    def __init__(self, shell: Shell, clock: Clock, defaults: Defaults | None = None) -> None:
        self._shell = shell
        self._clock = clock
        self._defaults = defaults or Defaults()

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        """Look at all the hosts, some at once; the order is kept."""
        places = asyncio.Semaphore(OBSERVED_AT_ONCE)

        async def look(host: Host) -> Observation:
            async with places:
                sight, why = await self._judge(host)
            return Observation(node=host.name, sight=sight, at=self._clock.now(), why=why)

        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(look(host)) for host in hosts]
        return [task.result() for task in looks]

    async def _judge(self, host: Host) -> tuple[Sight, str]:
        try:
            route = read_route(host, self._defaults)
        except NodeUnreachable as error:
            return Sight.UNKNOWN, str(error)
        if not route.direct:
            return await self._judge_by_login(host)
        try:
            async with asyncio.timeout(OBSERVE_TIMEOUT_S):
                return await _read_banner(route)
        except TimeoutError:
            return Sight.DOWN, f"no ssh banner from {route.address} within {OBSERVE_TIMEOUT_S:g}s"

    async def _judge_by_login(self, host: Host) -> tuple[Sight, str]:
        try:
            await self._shell.run(host, "true", timeout_s=LOGIN_TIMEOUT_S)
        except (NodeUnreachable, TimeoutError) as error:
            return Sight.DOWN, str(error)
        return Sight.UP, "answers over ssh by its jump host"


async def _read_banner(route: Route) -> tuple[Sight, str]:
    try:
        reader, writer = await asyncio.open_connection(route.host, route.port, limit=BANNER_BYTES)
    except socket.gaierror as error:
        return Sight.UNKNOWN, f"the name {route.host} does not resolve: {error.strerror}"
    except OSError as error:
        if error.errno in _OURS:
            return Sight.UNKNOWN, f"this machine cannot connect to anything now: {error.strerror}"
        happened = "refused" if refused(error) else f"failed: {error.strerror or error}"
        return Sight.DOWN, f"tcp connect to {route.address} {happened}"
    try:
        return await _judge_banner(reader, route)
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _judge_banner(reader: asyncio.StreamReader, route: Route) -> tuple[Sight, str]:
    read = 0
    try:
        while read < BANNER_BYTES:
            line = await reader.readline()
            if line.startswith(b"SSH-"):
                return Sight.UP, f"{route.address} answers as {line.decode(errors='replace').strip()[:80]}"
            if not line:
                return Sight.DOWN, f"{route.address} closed the connection before the ssh banner"
            read += len(line)
    except (OSError, ValueError) as error:  # ValueError: a line longer than the limit
        return Sight.DOWN, f"{route.address} broke off before the ssh banner: {error}"
    return Sight.DOWN, f"{route.address} answers, but not as an ssh server"
