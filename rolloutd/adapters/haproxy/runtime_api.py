"""HAProxy's Runtime API: one server of a backend on one balancer.

A request is one line on a connection of its own, which HAProxy closes after its answer.  It knows the
commands of HAProxy 2.2 and later, and nothing of isolation.
"""

from __future__ import annotations

import asyncio
import csv
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolloutd.adapters.bounded_read import read_start
from rolloutd.adapters.haproxy.registration import BalancerParams
from rolloutd.errors import NodeUnreachable, RolloutdError
from rolloutd.ports import JSON, AdapterContext, Host, InventorySnapshot, Shell

REQUEST_TIMEOUT_S = 10.0
"""Limit of one request: HAProxy answers within milliseconds, a new ssh connection within seconds."""

MAX_RESPONSE_BYTES = 4 * 1024 * 1024
"""Limit of one response: some 40,000 servers."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,255}")
"""Names of backends and servers that HAProxy allows; others would be read as further commands."""

# srv_admin_state of `show servers state` is a bit mask (HAProxy's management guide and include/server-t.h).
_FORCED_MAINT, _FORCED_DRAIN = 0x01, 0x08

_NODE_REQUEST = (
    "import socket,sys;s=socket.socket(socket.AF_UNIX);s.settimeout(9);s.connect(sys.argv[1]);"
    "s.sendall(sys.stdin.buffer.read());sys.stdout.buffer.write(s.makefile('rb').read())"
)


class AdminState(StrEnum):
    """What people and programs ask of a server, as `set server ... state` takes it."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"


class HaproxyFailed(RolloutdError):
    """A balancer answered that it cannot do something; nothing was changed by that request."""


class BalancerUnreachable(RolloutdError):
    """A balancer did not answer."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server as one balancer sees it; `sessions` are running and queued ones, `weight` is the user's."""

    admin: AdminState
    weight: int
    sessions: int


class Balancer:
    def __init__(self, name: str, params: BalancerParams, context: AdapterContext) -> None:
        self.name = name
        self._address = params.model_dump(exclude_none=True)
        self._shell: Shell = context.shell
        self._inventory: Callable[[], InventorySnapshot] = context.inventory

    async def read(self, backend: str, server: str) -> ServerState:
        """Return the server's state; raises HaproxyFailed if it is unknown there, BalancerUnreachable."""
        try:
            return await self._read(backend, server)
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise BalancerUnreachable(
                f"haproxy {self.name}: the answer about {backend}/{server} is not readable ({error!r:.100});"
                " check what listens there"
            ) from error

    async def _read(self, backend: str, server: str) -> ServerState:
        states = await self._table(f"show servers state {backend}", " ", "be_id")
        row = next((row for row in states if row["srv_name"] == server), None)
        if row is None:
            raise HaproxyFailed(
                f"haproxy {self.name}: there is no server {backend}/{server}; correct the plan"
            )
        stats = await self._statistics(row, backend, server)
        return ServerState(
            _admin_state(int(row["srv_admin_state"])),
            int(row["srv_uweight"]),
            int(stats["scur"]) + int(stats["qcur"]),
        )

    async def _statistics(self, ids: Mapping[str, str], backend: str, server: str) -> Mapping[str, str]:
        # By both ids: the statistics of a whole backend may exceed what a node's shell returns, and a name
        # means a frontend of the same name first.  A backend that is named as this id is answered for it;
        # then all servers are read.
        for chosen in (f"{ids['be_id']} 4 {ids['srv_id']}", "-1 4 -1"):
            for row in await self._table(f"show stat {chosen}", ",", "pxname"):
                if (row["pxname"], row["svname"]) == (backend, server):
                    return row
        raise BalancerUnreachable(f"haproxy {self.name}: no statistics of {backend}/{server} this time")

    async def list_servers(self) -> list[tuple[str, str]]:
        """Return backend and name of every server; raises HaproxyFailed if the socket cannot change them."""
        level = (await self._request("show cli level")).strip()
        if level != "admin":
            raise HaproxyFailed(
                f"haproxy {self.name}: the socket has level {level[:40]!r}; give it `level admin`"
            )
        states = await self._table("show servers state", " ", "be_id")
        return [(row["be_name"], row["srv_name"]) for row in states if row.get("srv_name")]

    async def set_state(self, backend: str, server: str, state: AdminState) -> None:
        await self._command(f"set server {backend}/{server} state {state}")

    async def _table(self, line: str, delimiter: str, first_column: str) -> list[dict[str, str]]:
        answer = await self._request(line)
        before, head, table = answer.partition(f"# {first_column}{delimiter}")
        if not head:
            cause = before.strip()[:200] or "nothing"
            raise HaproxyFailed(f"haproxy {self.name}: `{line}` was answered with: {cause}; correct the plan")
        return list(csv.DictReader((first_column + delimiter + table).splitlines(), delimiter=delimiter))

    async def _command(self, line: str) -> None:
        answer = (await self._request(line)).strip()
        if answer:
            raise HaproxyFailed(
                f"haproxy {self.name}: `{line}` was answered with: {answer[:200]}; "
                "the socket needs `level admin`"
            )

    async def _request(self, line: str) -> str:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if "node" in self._address:
                    return await self._request_over_ssh(line)
                return await self._request_directly(line)
        except PermissionError as error:
            problem = f"{self._address['socket']}: permission denied"
            remedy = "add the daemon's user to the socket's group, and restart the daemon"
            raise BalancerUnreachable(f"haproxy {self.name}: {problem}; {remedy}") from error
        except FileNotFoundError as error:
            problem = f"there is no socket {self._address['socket']}"
            remedy = "start HAProxy, or correct the settings"
            raise BalancerUnreachable(f"haproxy {self.name}: {problem}; {remedy}") from error
        except (OSError, NodeUnreachable) as error:
            cause = str(error) or f"no answer within {REQUEST_TIMEOUT_S:.0f} s"
            raise BalancerUnreachable(
                f"haproxy {self.name}: {cause}; start it, or correct the settings"
            ) from error

    async def _request_directly(self, line: str) -> str:
        if "socket" in self._address:
            reader, writer = await asyncio.open_unix_connection(self._address["socket"])
        else:
            address, _, port = self._address["tcp"].rpartition(":")
            reader, writer = await asyncio.open_connection(address.strip("[]"), int(port))
        try:
            writer.write(line.encode() + b"\n")
            await writer.drain()
            answer = await read_start(reader, MAX_RESPONSE_BYTES + 1)
            if len(answer) > MAX_RESPONSE_BYTES:
                raise ConnectionError(f"the answer to `{line}` exceeds {MAX_RESPONSE_BYTES} bytes")
        finally:
            writer.close()
        return _complete(answer.decode(errors="replace"))

    async def _request_over_ssh(self, line: str) -> str:
        node, socket = self._address["node"], self._address["socket"]
        variables = self._inventory().hosts.get(node)
        if variables is None:
            raise ConnectionError(f"the inventory has no node {node}")
        command = shlex.join(["python3", "-c", _NODE_REQUEST, socket])
        host = Host(node, connection=variables)
        result = await self._shell.run(host, command, timeout_s=REQUEST_TIMEOUT_S, stdin=f"{line}\n")
        if result.exit_status != 0:
            cause = result.stderr.strip().rpartition("\n")[2] or f"exit status {result.exit_status}"
            raise ConnectionError(f"{socket} on {node}: {cause}")
        return _complete(result.stdout)


def choose_balancers(
    params: Mapping[str, JSON], context: AdapterContext, *, names: Sequence[str] = ()
) -> list[Balancer]:
    """Return the balancers `names`, else those that a step names, else all of the settings."""
    section = context.settings.section("haproxy")
    chosen = list(names) or list(params.get("balancers") or section)
    for name in chosen:
        if name not in section:
            raise HaproxyFailed(f"haproxy {name}: not in the settings; add it there, or correct `balancers`")
    if not chosen:
        raise HaproxyFailed("haproxy: the settings name no balancer; add the section `haproxy`")
    return [Balancer(name, section[name], context) for name in chosen]


def server_names(params: Mapping[str, JSON]) -> tuple[str, str]:
    """Return the rendered backend and server; raises HaproxyFailed if HAProxy cannot have such names."""
    backend, server = str(params["backend"]), str(params["server"])
    for name in (backend, server):
        if not _NAME.fullmatch(name):
            raise HaproxyFailed(
                f"haproxy: {name[:100]!r} is not a name of HAProxy; correct the plan's template"
            )
    return backend, server


def _admin_state(mask: int) -> AdminState:
    if mask & _FORCED_MAINT:
        return AdminState.MAINT
    return AdminState.DRAIN if mask & _FORCED_DRAIN else AdminState.READY


def _complete(answer: str) -> str:
    """Return an answer that ends as HAProxy ends one; a shorter one was cut off."""
    if not answer.endswith("\n"):
        raise ConnectionError("the answer was cut off")
    return answer
