"""Snapshots of nodes over ssh: the parser of what snapshot.sh prints there.

It does not compare them: machines.model.node_snapshot does.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address

from machines.model.node_snapshot import BOOT_ID
from rolloutd.adapters.ssh.check import stderr_suffix
from rolloutd.adapters.ssh.shell_adapter import read_node_script, run_as_root
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Host, Shell

MAX_BYTES = 4 * 1024 * 1024
"""Limit of the unpacked output: ten times that of a node with a thousand units and kernel parameters."""

MAX_ENTRIES = 20_000

MAX_VALUE_CHARS = 400
"""Limit of a value: enough to recognise what changed."""

_SOCKET = re.compile(r"([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) ([0-9]+)")
"""An address and a port as in /proc/net/tcp and its like, and an inode."""

_LISTENER = re.compile(r"([0-9]+) ([0-9]{1,20}) \((.*)\)(?: \S+){19} ([0-9]{1,20})(?: .*)?")
"""An inode and the line of /proc/PID/stat: pid, name, and start as field 22."""

_SYSCTL_NAME = str.maketrans("/.", "./")
"""As sysctl(8) writes it: a dot inside a part, as in a device's name, becomes a slash."""

_SCRIPT = read_node_script("snapshot.sh")

_Entries = Iterator[tuple[str, str]]


class SshSnapshots:
    """ports.NodeSnapshots over the daemon's ssh connections."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        result = await run_as_root(self._shell, host, _SCRIPT, timeout_s=timeout_s)
        text = _unpack(result.stdout)
        if text is None:
            problem = stderr_suffix(result) or f": it ended with {result.exit_status}"
            raise AdapterFailed(f"{host.name}: the snapshot is not complete{problem}; check its /proc and sh")
        return parse_snapshot(text)


def parse_snapshot(text: str) -> dict[str, str]:
    """Return values by key; lines that are not as expected are left out."""
    sections = _sections(text)
    ephemeral = _port_range(sections.get("ephemeral", ()))
    snapshot: dict[str, str] = {}
    for key, value in _entries(sections, ephemeral):
        if len(snapshot) >= MAX_ENTRIES:
            break
        # Values of one key, such as the addresses of a port, are one value.
        known = snapshot.get(key)
        snapshot[key] = _shorten(value if known is None else f"{known}, {value}")
    return snapshot


def _unpack(output: str) -> str | None:
    """Return what the script wrote, None if it is not whole."""
    form, _, rest = output.partition("\n")
    if form == "gzip":
        try:
            packed = base64.b64decode("".join(rest.split()), validate=True)
            # Bounded: a few kilobytes of gzip can hold gigabytes.
            rest = zlib.decompressobj(wbits=31).decompress(packed, MAX_BYTES).decode(errors="replace")
        except (ValueError, zlib.error):
            return None
    return rest if rest.endswith("@end\n") else None


def _sections(text: str) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith("@"):
            lines = sections.setdefault(line[1:], [])
        else:
            lines.append(line)
    return sections


def _entries(sections: Mapping[str, list[str]], ephemeral: range) -> _Entries:
    readers: tuple[tuple[str, Callable[[list[str]], _Entries]], ...] = (
        ("boot", lambda lines: ((BOOT_ID, line) for line in lines[:1])),
        ("tcp", lambda lines: _ports("tcp", lines, range(0))),
        # Clients open UDP ports of this range for a moment, such as for a name.
        ("udp", lambda lines: _ports("udp", lines, ephemeral)),
        ("units", _units),
        ("listeners", lambda lines: _listeners(lines, sections.get("tcp", []))),
        ("modules", lambda lines: ((f"module/{name}", "loaded") for name in lines if name)),
        ("routes", _routes),
        ("proc-routes", _proc_routes),
        ("addresses", _addresses),
        ("proc-addresses", _proc_addresses),
        ("sysctls", _sysctls),
        ("mounts", _mounts),
        ("lock-files", lambda lines: _package_locks(lines, sections.get("locks", []))),
    )
    for name, read in readers:
        yield from read(sections.get(name, []))


def _port_range(lines: Iterable[str]) -> range:
    numbers = [word for line in lines for word in line.split() if re.fullmatch("[0-9]{1,5}", word)]
    return range(int(numbers[0]), int(numbers[1]) + 1) if len(numbers) == 2 else range(0)


def _ports(protocol: str, lines: Iterable[str], ignored: range) -> _Entries:
    for port, address in sorted({(port, address) for port, address, _ in _sockets(lines)}):
        if port not in ignored:
            yield f"port/{protocol}/{port}", address


def _sockets(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield port, address and inode of each socket."""
    for line in lines:
        if match := _SOCKET.fullmatch(line):
            yield int(match[2], 16), _kernel_address(match[1]), match[3]


def _kernel_address(text: str) -> str:
    """Return an address that the kernel wrote as little-endian words."""
    raw = bytes.fromhex(text)
    return str(ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))


def _units(lines: Iterable[str]) -> _Entries:
    unit: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        if line:
            unit[name] = value
        else:  # a unit without a process has no MainPID, so only the empty line ends it
            yield from _unit(unit)
            unit = {}
    yield from _unit(unit)


def _unit(unit: Mapping[str, str]) -> _Entries:
    name = unit.get("Id", "")
    match unit.get("ActiveState"):
        case "active" | "reloading":
            pid = unit.get("MainPID", "")
            process = f"pid {pid}, " if pid not in ("", "0") else ""
            yield f"unit/{name}", f"{process}active since {unit.get('ActiveEnterTimestampMonotonic')} us"
        case "failed":
            yield f"failed-unit/{name}", "failed"


def _listeners(lines: Iterable[str], tcp: Iterable[str]) -> _Entries:
    """Yield the oldest process of each port: the one that opened it, not those that it forked."""
    ports = {inode: port for port, _, inode in _sockets(tcp)}
    oldest: dict[int, tuple[int, int, str]] = {}
    for line in lines:
        match = _LISTENER.fullmatch(line)
        if match is None or match[1] not in ports:
            continue
        process = (int(match[4]), int(match[2]), match[3])
        port = ports[match[1]]
        oldest[port] = min(process, oldest.get(port, process))
    for port, (start, pid, name) in sorted(oldest.items()):
        yield f"process/tcp/{port}", f"{name} pid {pid}, since tick {start}"


def _routes(lines: Iterable[str]) -> _Entries:
    for line in sorted(set(lines)):
        if " table local" in line or line.startswith(("local ", "broadcast ", "multicast ", "anycast ")):
            continue  # they follow from the addresses
        destination, _, rest = re.sub(r" (expires|users|age) \S+", "", line).strip().partition(" ")
        if destination:
            yield f"route/{destination}", rest


def _proc_routes(lines: Iterable[str]) -> _Entries:
    for line in sorted(set(lines)):
        fields = line.split()
        if len(fields) == 5 and fields[0] != "Iface":
            yield f"route/{fields[1]}/{fields[4]}", f"dev {fields[0]} via {fields[2]} metric {fields[3]}"


def _addresses(lines: Iterable[str]) -> _Entries:
    """Yield addresses without their lifetimes, which run down, and without temporary ones, which rotate."""
    for line in sorted(lines):
        words = line.partition("\\")[0].split()
        if len(words) >= 4 and words[2] in ("inet", "inet6") and "temporary" not in words:
            flags = [word for word in words[4:] if word not in ("tentative", "deprecated", "dynamic")]
            yield f"address/{words[1]}/{words[3]}", " ".join(flags)


def _proc_addresses(lines: Iterable[str]) -> _Entries:
    for line in sorted(lines):
        fields = line.split()
        if len(fields) == 6:
            yield f"address/{fields[5]}/{fields[0]}", f"prefix {fields[2]}"


def _sysctls(lines: Iterable[str]) -> _Entries:
    for line in lines:
        path, colon, value = line.partition(":")
        if colon and path.startswith("/proc/sys/"):
            name = path.removeprefix("/proc/sys/").translate(_SYSCTL_NAME)
            yield f"sysctl/{name}", " ".join(value.split())


def _mounts(lines: Iterable[str]) -> _Entries:
    for line in lines:
        fields = line.split(" ")
        if len(fields) >= 4:
            yield f"mount{fields[1]}", " ".join((fields[0], *fields[2:4]))


def _package_locks(lines: Iterable[str], locks: Iterable[str]) -> _Entries:
    held = {fields[5].rpartition(":")[2] for line in locks if len(fields := line.split()) >= 8}
    for line in lines:
        inode, _, file = line.partition(" ")
        if inode == "held" or inode in held:
            yield f"package-lock{file}", "held"


def _shorten(value: str) -> str:
    if len(value) <= MAX_VALUE_CHARS:
        return value
    # The rest counts too: a difference behind the cut is a difference.
    return f"{value[:MAX_VALUE_CHARS]}... crc {zlib.crc32(value.encode(errors='replace')):08x}"
