"""NodeUnreachable and HostKeyChanged from errors of asyncssh and sockets.

It opens no connection; to name a line it reads the known_hosts files.
"""

from __future__ import annotations

import errno
import shlex
import socket
from pathlib import Path

import asyncssh

from rolloutd.adapters.ssh.route import Route
from rolloutd.errors import HostKeyChanged, NodeUnreachable

MAX_ERROR_LENGTH = 300
"""Limit of a quoted message from the node: it is shown on one line."""


def login_error(
    node: str, route: Route, error: BaseException, offered_key: asyncssh.SSHKey | None
) -> NodeUnreachable:
    """Return the error of a failed login; `offered_key` is the rejected host key, if the node sent one."""
    if isinstance(error, asyncssh.HostKeyNotVerifiable) or _has_no_common_key(error, route):
        return _host_key_error(node, route, offered_key)
    return NodeUnreachable(f"{node}: {_describe_error(route, error)}")


def _describe_error(route: Route, error: BaseException) -> str:
    match error:
        case asyncssh.PermissionDenied():
            who = f"user {route.user}" if route.user else "this user"
            return f"authentication refused by {route.address} for {who} {_describe_keys(route)}"
        case asyncssh.KeyEncryptionError():
            return f"{_describe_keys(route)}: the key is encrypted, and a daemon cannot enter a passphrase"
        case asyncssh.KeyImportError():
            return f"{_describe_keys(route)}: the key cannot be read: {_shorten(error)}"
        case asyncssh.ConnectionLost() | ConnectionResetError() | BrokenPipeError():
            return f"{route.address} closed the connection before the login was complete"
        case asyncssh.ChannelOpenError():
            return f"the jump host {route.jumps[-1:] or ''} cannot reach {route.address}: {_shorten(error)}"
        case asyncssh.ConfigParseError():
            return f"the ssh configuration of this user cannot be read: {_shorten(error)}"
        case asyncssh.Error():
            return f"ssh to {route.address} failed: {_shorten(error)}"
        case socket.gaierror():
            return f"the name {route.host} does not resolve: {error.strerror}"
        case FileNotFoundError() | PermissionError() if error.filename:
            return f"{error.filename} cannot be read: {error.strerror}"
        case OSError() if is_connection_refused(error):
            return f"tcp connect to {route.address} refused"
        case OSError():
            return f"tcp connect to {route.address} failed: {error.strerror or _shorten(error)}"
        case _:
            return f"ssh to {route.address} failed: {_shorten(error)}"


def is_connection_refused(error: OSError) -> bool:
    """Return whether no address of the host has a listener."""
    return error.errno == errno.ECONNREFUSED or "refused" in str(error)


def _describe_keys(route: Route) -> str:
    if route.password is not None:
        return "with a password"
    if not route.key_files:
        return "with the keys of ~/.ssh and the agent"
    return "with key " + ", ".join(str(path) for path in route.key_files)


def _shorten(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:MAX_ERROR_LENGTH]


def _has_no_common_key(error: BaseException, route: Route) -> bool:
    """Return whether the node has none of the key types that known_hosts lists for it: its key changed."""
    return (
        isinstance(error, asyncssh.KeyExchangeFailed)
        and "host key" in str(error)
        and bool(_find_known_hosts_lines(route))
    )


def _host_key_error(node: str, route: Route, offered_key: asyncssh.SSHKey | None) -> HostKeyChanged:
    found_key = "an unknown kind of key"
    if offered_key is not None:
        found_key = f"{offered_key.get_algorithm()} {offered_key.get_fingerprint()}"
    known_lines = _find_known_hosts_lines(route)
    file = route.known_hosts[0]
    if not known_lines:
        port = f"-p {route.port} " if route.port != 22 else ""
        return HostKeyChanged(
            f"{node}: {route.address} answers with host key {found_key}, and no key of "
            f"{route.known_hosts_name} is in "
            f"{file}; compare the fingerprint with the node's own, then add it: "
            f"ssh-keyscan {port}{route.host} >> {shlex.quote(str(file))}"
        )
    known_file, number = known_lines[0]
    return HostKeyChanged(
        f"{node}: the host key of {route.address} has changed: it is {found_key}, but "
        f"{known_file} line {number} "
        "has another; this may be an attack. If the node was reinstalled: ssh-keygen -R "
        f"{shlex.quote(route.known_hosts_name)} -f {shlex.quote(str(known_file))}, then add the new key"
    )


def _find_known_hosts_lines(route: Route) -> list[tuple[Path, int]]:
    """Return the files and line numbers of the node's keys in known_hosts."""
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
