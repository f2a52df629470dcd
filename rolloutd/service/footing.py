"""Whether this machine has what the settings name: files, a group, a command, a path that a socket can have.

Nothing is opened and nobody is asked; what a file holds is for its reader to
judge.  Whoever asks decides whether a lack is a mistake or a warning.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutd.service.binding import CannotListen, gid_of, mind_length
from rolloutd.settings import Settings

CREDENTIALS = Path("/run/credentials")
"""Where systemd keeps the credentials of services, each in a directory that is there while the service is."""

_OTHERS = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that the settings name under `where` and this machine does not have."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def lacks(settings: Settings) -> tuple[Lack, ...]:
    """Return everything that is named and not there, or not as it must be; looks at files."""
    return (*_socket(settings), *_files(settings), *_command(settings.ansible.bin))


def _socket(settings: Settings) -> Iterator[Lack]:
    try:
        mind_length(settings.socket)
    except CannotListen as error:
        yield Lack("socket", str(error))
    try:
        if settings.socket_group is not None:
            gid_of(settings.socket_group)
    except CannotListen as error:
        yield Lack("socket_group", str(error))


def _files(settings: Settings) -> Iterator[Lack]:
    for where, path in (
        ("ssh.known_hosts", settings.ssh.known_hosts),
        ("ssh.key_file", settings.ssh.key_file),
    ):
        if path is not None:
            yield from _file(where, path, "no node can be reached as the settings say")
    for name, account in settings.service_accounts.items():
        where, so = f"service_accounts.{name}.key_file", f"{name} cannot vote"
        yield from _file(where, account.key_file, so, secret=True)
    if settings.notify is not None:
        so = "nobody can be told of anything"
        yield from _file("notify.urls_file", settings.notify.urls_file, so, secret=True)


def _file(where: str, path: Path, so: str, *, secret: bool = False) -> Iterator[Lack]:
    if path.is_relative_to(CREDENTIALS) and not path.parent.is_dir():
        return  # handed over only while the service runs
    try:
        mode = path.stat().st_mode
    except OSError as error:
        yield Lack(where, f"{path} cannot be read ({error.strerror}), so {so}: make it, or name another")
        return
    if not stat.S_ISREG(mode):
        yield Lack(where, f"{path} is no file, so {so}: name another")
    elif not os.access(path, os.R_OK):
        yield Lack(where, f"{path} cannot be read by uid {os.geteuid()}, so {so}: chgrp it, mode 0640")
    elif secret and mode & _OTHERS:
        yield Lack(where, f"others may read or write {path}, so {so}: chmod 640 {path}")


def _command(command: Path | None) -> Iterator[Lack]:
    if command is not None and shutil.which(command) is None:
        yield Lack(
            "ansible.bin", f"{command} is no command that can be run, so no playbook can: name another"
        )
