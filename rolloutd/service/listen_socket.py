"""Sockets that the daemon listens at: Unix sockets in the file system, and loopback ports.

A Unix socket appears at its path only after its mode and group are set, so no other user can ever connect.  A
stale socket is replaced; a socket with a listener is not.  It does not know what is sent over the socket.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.errors import AlreadyRunning, RolloutdError

SOCKET_MODE = 0o660
"""Read and write for the daemon's user and the group of the settings."""

DIRECTORY_MODE = 0o755
"""The directory is public; the socket's own mode protects it."""

MAX_PATH_BYTES = 107
"""Bytes of a Unix socket's path (sun_path of Linux is 108, with its closing zero)."""

BACKLOG = 128
"""Connections the kernel keeps while the daemon is busy with a decision."""

CONNECT_TIMEOUT_S = 2.0
"""Time a listener has to accept; the kernel accepts at once unless its backlog is full."""


class CannotListen(RolloutdError):
    """The socket cannot be created at its path."""


@dataclass(frozen=True, slots=True)
class ListenSocket:
    sock: socket.socket
    path: Path
    device: int
    inode: int

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this socket."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    def remove(self) -> None:
        if self.is_in_place():
            with contextlib.suppress(OSError):
                self.path.unlink()


def bind(path: Path, group: str | None = None) -> ListenSocket:
    """Listen at the path, mode 0660; blocks for CONNECT_TIMEOUT_S at most.

    Raises AlreadyRunning when a daemon listens there, CannotListen otherwise.
    """
    with _listen_at_temporary_path(path, group) as (sock, temporary):
        temporary.rename(path)
        made = path.stat()
        return ListenSocket(sock, path, made.st_dev, made.st_ino)


def bind_address(address: str, setting: str) -> socket.socket:
    """Listen at HOST:PORT; raises CannotListen, which names the setting."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"{address}: cannot listen there: {error.strerror or error}; name another `{setting}`"
        ) from error


def check_bindable(path: Path, group: str | None = None) -> None:
    """Raise what bind() would raise, and leave the path as it is; blocks for CONNECT_TIMEOUT_S at most."""
    with _listen_at_temporary_path(path, group) as (sock, _):
        sock.close()


def require_valid_path_length(path: Path) -> None:
    """Raise CannotListen for a path that is too long for a Unix socket."""
    temporary = _temporary_path(path)
    if len(os.fsencode(temporary)) > MAX_PATH_BYTES:
        raise CannotListen(
            f"the socket's path {path} is too long: Linux allows {MAX_PATH_BYTES} bytes, "
            f"{len(os.fsencode(temporary)) - len(os.fsencode(path))} of them for us; name a shorter `socket`"
        )


def lookup_gid(group: str) -> int:
    """Return the id of the socket's group; raises CannotListen for an unknown one."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise CannotListen(f"this machine has no group {group!r}; create it or change the settings") from None


def adopt_socket(descriptor: int) -> socket.socket:
    """Take over a socket from socket activation; raises CannotListen."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as exc:
        raise CannotListen(f"descriptor {descriptor} is not a socket: {exc.strerror}") from exc
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.detach()
        raise CannotListen(f"descriptor {descriptor} is not a Unix stream socket")
    sock.setblocking(False)
    return sock


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


@contextlib.contextmanager
def _listen_at_temporary_path(path: Path, group: str | None) -> Iterator[tuple[socket.socket, Path]]:
    """Listen at a temporary path, with mode and group set, unless a daemon listens at the path itself."""
    require_valid_path_length(path)
    gid = None if group is None else lookup_gid(group)
    temporary = _temporary_path(path)
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        _remove_stale_socket(path)
        temporary.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fspath(temporary))
            temporary.chmod(SOCKET_MODE)
            if gid is not None:
                os.chown(temporary, -1, gid)
            # Before the rename: a client that finds the path must not be refused.
            sock.listen(BACKLOG)
            sock.setblocking(False)
            yield sock, temporary
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        raise CannotListen(f"cannot listen at {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_stale_socket(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise CannotListen(f"{path} exists and is not a socket; move it away or name another `socket`")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(CONNECT_TIMEOUT_S)
        try:
            client.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as exc:
            problem = f"another process holds {path} and does not answer: {exc.strerror or exc}"
            raise AlreadyRunning(problem) from exc
    raise AlreadyRunning(f"another daemon answers at {path}; stop it first")
