"""Traffic probe `ssh`: established TCP connections of the node's ports, as `ss` on the node lists them.

`ss` sees the network namespace of the login only.  The probe's own ssh session is not counted.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from machines.model.timefmt import format_duration
from rolloutd.adapters.ssh.shell_adapter import ShellAdapter
from rolloutd.errors import NodeUnreachable, RolloutdError
from rolloutd.ports import JSON, Busy, Ok, StepContext, Unknown
from rolloutd.texts.formats import pluralize

MAX_PORT = 65_535

MAX_LISTED_BYTES = 60_000
"""Limit of the list, below that of the shell: some 600 connections; more are "at least" so many."""

MAX_SHOWN_CHARS = 120
"""Limit of a quoted error of the node."""

MIN_SHOWN_AGE_S = 60.0
"""Age from which the longest connection is named: shorter ones are ordinary requests."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class InvalidPorts(RolloutdError):
    """A rendered port is not a port."""


class UnreadableOutput(RolloutdError):
    """`ss` printed something that is not a list of connections."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One established connection: the node's port, and the other end."""

    port: int
    peer: IPAddress
    peer_port: int


@dataclass
class ConnectionsProbe(ShellAdapter):
    """ports.TrafficProbe with the parameters `established`, `ignore`, `max`.

    `ss` has no age of a connection, so `_first_seen` remembers since when each busy node's were listed.
    """

    _first_seen: dict[str, dict[Connection, float]] = field(default_factory=dict)

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node = ctx.host.name
        try:
            ports = read_ports(ctx.params["established"])
            timeout_s = ctx.remaining_s(self._clock.now())
            result = await self._shell.run(ctx.host, list_command(ports), timeout_s=timeout_s)
            found, is_complete = read_connections(result.stdout)
        except UnreadableOutput as error:
            return Unknown(f"{node}: traffic is unknown: {error}{_last_line(result.stderr)}")
        except (NodeUnreachable, TimeoutError, InvalidPorts) as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        ignored = [ipaddress.ip_network(text) for text in ctx.params.get("ignore") or ()]
        counted = [each for each in found if not any(each.peer in network for network in ignored)]
        return self._judge(node, ports, counted, int(ctx.params.get("max", 0)), is_complete=is_complete)

    def _judge(
        self, node: str, ports: Sequence[int], counted: list[Connection], most: int, *, is_complete: bool
    ) -> Ok | Busy | Unknown:
        total = pluralize(len(counted), "connection")
        where = ", ".join(f":{port}" for port in ports)
        if len(counted) <= most:
            self._first_seen.pop(node, None)
            if not is_complete:
                return Unknown(f"{node}: traffic is unknown: ss lists too many connections on {where}")
            return Ok(f"{node} is idle: {total} on {where}")
        number = total if is_complete else f"at least {total}"
        addresses = pluralize(len({each.peer for each in counted}), "address", "addresses")
        text = f"{number} on {where} from {addresses}{self._longest_age(node, counted)}"
        return Busy(f"{node} is busy: {text}", count=len(counted))

    def _longest_age(self, node: str, counted: Iterable[Connection]) -> str:
        now, known = self._clock.now(), self._first_seen.get(node, {})
        since = self._first_seen[node] = {each: min(known.get(each, now), now) for each in counted}
        age_s = now - min(since.values())
        return f", longest {format_duration(age_s)}" if age_s >= MIN_SHOWN_AGE_S else ""


def list_command(ports: Sequence[int]) -> str:
    """Return the command that prints its own session, the connections of these ports, and an end mark.

    The end mark has the status of `ss`; without it the list was cut.
    """
    chosen = " or ".join(f"sport = :{port}" for port in ports)
    listed = f"ss -Htn state established '( {chosen} )'; echo \"end $?\""
    script = f'echo "own $SSH_CONNECTION"; {{ {listed}; }} | head -c {MAX_LISTED_BYTES}'
    return f"sh -c {shlex.quote(script)}"


def read_ports(values: Iterable[JSON]) -> tuple[int, ...]:
    """Return the ports of rendered values; raises InvalidPorts."""
    ports = []
    for value in values:
        text = str(value).strip()
        if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
            raise InvalidPorts(f"established: {text[:20]!r} is not a port; correct the node's label")
        ports.append(int(text))
    return tuple(dict.fromkeys(ports))


def read_connections(output: str) -> tuple[list[Connection], bool]:
    """Return the connections that the command printed, and whether they are all; raises UnreadableOutput."""
    # The login shell's own files may print lines before.
    first, *lines = list(dropwhile(lambda line: not line.startswith("own"), output.splitlines())) or [""]
    if not lines:
        raise UnreadableOutput("it printed no list of connections")
    end = lines.pop()  # the end mark, or a line that was cut
    if end.startswith("end ") and end != "end 0":
        raise UnreadableOutput(f"ss ended with status {end.removeprefix('end ')}; check iproute2 there")
    try:
        own = _read_own_session(first.split()[1:])
        found = [_read_line(line) for line in lines]
    except ValueError as error:
        raise UnreadableOutput(f"it printed what is not a connection: {str(error)[:80]}") from None
    return [each for each in found if each != own], end == "end 0"


def _read_own_session(words: Sequence[str]) -> Connection | None:
    """Return the session of $SSH_CONNECTION (client address and port, server address and port)."""
    if len(words) != 4:
        return None
    return Connection(int(words[3]), _read_address(words[0]), int(words[1]))


def _read_line(line: str) -> Connection:
    """Read `RECV-Q SEND-Q LOCAL:PORT PEER:PORT`; raises ValueError."""
    _, _, local, remote, *_ = line.split()
    peer, _, peer_port = remote.rpartition(":")
    return Connection(int(local.rpartition(":")[2]), _read_address(peer), int(peer_port))


def _read_address(text: str) -> IPAddress:
    """Return an address without brackets and interface; IPv4 in IPv6 is IPv4; raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0].strip("[]"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f" ({lines[-1][:MAX_SHOWN_CHARS]})" if lines else ""
