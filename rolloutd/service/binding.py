"""The place in the file system where the daemon is reached.

The socket appears under its name only once its mode and group are right, so
there is no moment in which the wrong people can connect.  A socket that nobody
answers is replaced; one that somebody answers never is.  It knows files and
sockets, nothing of what is said over them.
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
"""Read and write for the daemon's user and the group of the settings, nobody else."""

DIRECTORY_MODE = 0o755
"""The directory tells nothing; the socket in it is what is guarded."""

LONGEST_PATH = 107
"""Bytes of a Unix socket's path (sun_path of Linux is 108, with its closing zero)."""

BACKLOG = 128
"""Connections the kernel keeps while the daemon is busy with a decision."""

KNOCK_TIMEOUT_S = 2.0
"""How long somebody who holds the socket has to accept; the kernel does it for him at once."""


class CannotListen(RolloutdError):
    """The socket cannot be made at its path; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A listening socket and the file it is reached by."""

    sock: socket.socket
    path: Path
    device: int
    inode: int

    def in_place(self) -> bool:
        """Say whether the path still leads to this socket."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)

    def remove(self) -> None:
        """Take the file away, if it is still ours."""
        if self.in_place():
            with contextlib.suppress(OSError):
                self.path.unlink()


def bind(path: Path, group: str | None = None) -> Bound:
    """Listen at the path, mode 0660; blocks shortly.

    Raises AlreadyRunning when somebody answers there, CannotListen otherwise.
    """
    with _drafted(path, group) as (sock, draft):
        draft.rename(path)
        made = path.stat()
        return Bound(sock, path, made.st_dev, made.st_ino)


def rehearse(path: Path, group: str | None = None) -> None:
    """Do what `bind` does but for taking the name, and raise what it would raise; blocks shortly."""
    with _drafted(path, group) as (sock, _):
        sock.close()


def mind_length(path: Path) -> None:
    """Raise CannotListen for a path that no Unix socket can have."""
    draft = _draft(path)
    if len(os.fsencode(draft)) > LONGEST_PATH:
        raise CannotListen(
            f"the socket's path {path} is too long: Linux allows {LONGEST_PATH} bytes, "
            f"{len(os.fsencode(draft)) - len(os.fsencode(path))} of them for us; name a shorter `socket`"
        )


def gid_of(group: str) -> int:
    """Return the id of the socket's group; raises CannotListen for one that this machine does not know."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise CannotListen(f"this machine has no group {group!r}; create it or change the settings") from None


def adopt(descriptor: int) -> socket.socket:
    """Take over a socket that was made for us (socket activation); raises CannotListen."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as exc:
        raise CannotListen(f"descriptor {descriptor} is no socket: {exc.strerror}") from exc
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.detach()
        raise CannotListen(f"descriptor {descriptor} is not a Unix stream socket")
    sock.setblocking(False)
    return sock


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


@contextlib.contextmanager
def _drafted(path: Path, group: str | None) -> Iterator[tuple[socket.socket, Path]]:
    """Listen beside the path, with mode and group right, as long as nobody answers at the path itself."""
    mind_length(path)
    gid = None if group is None else gid_of(group)
    draft = _draft(path)
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        _make_way(path)
        draft.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fspath(draft))
            draft.chmod(SOCKET_MODE)
            if gid is not None:
                os.chown(draft, -1, gid)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            yield sock, draft
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        raise CannotListen(f"cannot listen at {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _make_way(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise CannotListen(f"{path} exists and is no socket; move it away or name another `socket`")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(KNOCK_TIMEOUT_S)
        try:
            knock.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as exc:
            raise AlreadyRunning(f"somebody holds {path} and does not answer: {exc.strerror or exc}") from exc
    raise AlreadyRunning(f"another daemon answers at {path}; stop it first")
