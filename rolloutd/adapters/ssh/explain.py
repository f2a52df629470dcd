"""Why a node could not be reached, in words a person can act on.

It turns what asyncssh and the socket say into NodeUnreachable and
HostKeyChanged; it opens no connection, and it reads only the known_hosts files
it has to name a line of.
"""

from __future__ import annotations

import errno
import shlex
import socket
from pathlib import Path

import asyncssh

from rolloutd.adapters.ssh.route import Route
from rolloutd.errors import HostKeyChanged, NodeUnreachable

ERROR_LENGTH = 300
"""Kept of a message that comes from the other side: it is shown on one line."""


def explain_failed_login(
    node: str, route: Route, error: BaseException, offered: asyncssh.SSHKey | None
) -> NodeUnreachable:
    """Say why the login failed; `offered` is the host key that was not accepted, if it came so far."""
    if isinstance(error, asyncssh.HostKeyNotVerifiable) or _no_common_key(error, route):
        return _explain_host_key(node, route, offered)
    return NodeUnreachable(f"{node}: {_explain(route, error)}")


def _explain(route: Route, error: BaseException) -> str:
    match error:
        case asyncssh.PermissionDenied():
            who = f"user {route.user}" if route.user else "this user"
            return f"authentication refused by {route.address} for {who} {_keys(route)}"
        case asyncssh.KeyEncryptionError():
            return f"{_keys(route)}: the key is encrypted, and a daemon has nobody to ask for the passphrase"
        case asyncssh.KeyImportError():
            return f"{_keys(route)}: the key cannot be read: {_short(error)}"
        case asyncssh.ConnectionLost() | ConnectionResetError() | BrokenPipeError():
            return f"{route.address} closed the connection before the login was done"
        case asyncssh.ChannelOpenError():
            return f"the jump host {route.jumps[-1:] or ''} cannot reach {route.address}: {_short(error)}"
        case asyncssh.ConfigParseError():
            return f"the ssh configuration of this user cannot be read: {_short(error)}"
        case asyncssh.Error():
            return f"ssh to {route.address} failed: {_short(error)}"
        case socket.gaierror():
            return f"the name {route.host} does not resolve: {error.strerror}"
        case FileNotFoundError() | PermissionError() if error.filename:
            return f"{error.filename} cannot be read: {error.strerror}"
        case OSError() if refused(error):
            return f"tcp connect to {route.address} refused"
        case OSError():
            return f"tcp connect to {route.address} failed: {error.strerror or _short(error)}"
        case _:
            return f"ssh to {route.address} failed: {_short(error)}"


def refused(error: OSError) -> bool:
    """Whether nobody listens there; of several addresses of a name, on none."""
    return error.errno == errno.ECONNREFUSED or "refused" in str(error)


def _keys(route: Route) -> str:
    if route.password is not None:
        return "with a password"
    if not route.key_files:
        return "with the keys of ~/.ssh and the agent"
    return "with key " + ", ".join(str(path) for path in route.key_files)


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:ERROR_LENGTH]


def _no_common_key(error: BaseException, route: Route) -> bool:
    """Whether the node has no key of a kind that known_hosts has of it: it was changed."""
    return isinstance(error, asyncssh.KeyExchangeFailed) and "host key" in str(error) and bool(_lines(route))


def _explain_host_key(node: str, route: Route, offered: asyncssh.SSHKey | None) -> HostKeyChanged:
    seen = "an unknown kind of key"
    if offered is not None:
        seen = f"{offered.get_algorithm()} {offered.get_fingerprint()}"
    lines = _lines(route)
    file = route.known_hosts[0]
    if not lines:
        port = f"-p {route.port} " if route.port != 22 else ""
        return HostKeyChanged(
            f"{node}: {route.address} answers with host key {seen}, and no key of {route.known_as} is in "
            f"{file}; compare the fingerprint with the node's own, then add it: "
            f"ssh-keyscan {port}{route.host} >> {shlex.quote(str(file))}"
        )
    known_file, number = lines[0]
    return HostKeyChanged(
        f"{node}: the host key of {route.address} has changed: it is {seen}, but {known_file} line {number} "
        "has another; somebody may be in between. If the node was installed anew: ssh-keygen -R "
        f"{shlex.quote(route.known_as)} -f {shlex.quote(str(known_file))}, then add the new key"
    )


def _lines(route: Route) -> list[tuple[Path, int]]:
    """Return where known_hosts speaks of the node: file and line number."""
    name, port = route.alias or route.host, None if route.port == 22 else route.port
    found = []
    for path in route.known_hosts:
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            try:
                matched = asyncssh.import_known_hosts(line).match(name, "", port)
            except ValueError:
                continue
            if matched[0] or matched[1]:
                found.append((path, number))
    return found
